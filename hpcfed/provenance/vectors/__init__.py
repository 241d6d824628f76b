"""Conformance vectors: small trajectories of every method, in JSON, by which any framework can test itself."""
