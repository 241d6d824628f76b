"""Diagnosis of the machine and the MPI: facts, short measurements, and findings on what is slow or wrong."""
