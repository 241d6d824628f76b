"""The version, kept apart so that reading it imports nothing."""

__version__ = "0.2.0.dev0"

ARITHMETIC = 2
"""How clients' bits are made; 1: clients in groups whose size followed the rank's share (before tiles)."""
