"""Preparation of federation files from raw or synthetic data, without torch and MPI.

``sources`` and ``synthetic`` make a `Dataset`, ``partition`` assigns its samples to clients, ``write`` stores the
result.
"""
