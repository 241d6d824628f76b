"""Verification of a run folder: its files against the certificate, then its rounds, computed again and compared."""
