"""Arithmetic whose result does not depend on the instruction set or a library: what ``bits: portable`` computes with.

Element by element, IEEE 754 rounds +, −, ·, / and √ in one way, everywhere. What differs between machines is the order
of sums (BLAS, vector registers of another length), a product and a sum rounded once in place of twice (FMA), and the
functions of a library (exp, log, pow; MKL's √, too). Here sums have a stated order, no operation multiplies and adds,
and functions are made of the five operations. docs/bits.md has the measurements.

    sums         sums over an axis by halving, and products of matrices by them
    elementary   exp, log, log1p and whole powers
    operations   the operations that the rest of hpcfed chooses between: the libraries' or portable ones

    first_calls  MKL's vector functions called once, so that the bits of several threads are those of every process
"""
