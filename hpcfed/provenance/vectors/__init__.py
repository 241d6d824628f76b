"""Conformance vectors: small trajectories of every method, in JSON, against which any framework can be tested."""
