"""Diagnosis of a job's machines and MPI library: facts, short measurements, and findings on what is slow or wrong."""
