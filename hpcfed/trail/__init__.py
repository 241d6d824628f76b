"""Provenance of a run: a certificate, its signature, and their comparison with the folder."""
