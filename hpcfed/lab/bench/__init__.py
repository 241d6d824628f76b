"""Benchmarks of rounds, start-up and reductions against bare equivalents, interleaved: medians and ratios."""
