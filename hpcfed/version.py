"""The version, kept apart so that reading it imports nothing."""

__version__ = "0.2.0.dev0"

ARITHMETIC = 4
"""How clients' bits are made; 1: clients in groups whose size followed the rank's share (before tiles); 2: general
modules in tiles by vmap, others one after another (before modules were read); 3: DP-SGD with a gradient for each
sample, also of perceptrons."""
