"""Provenance of runs: certificates and signatures; verification, replay and comparison; conformance vectors."""
