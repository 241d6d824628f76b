"""Checkpoints: written whole or not at all while training goes on, and read back on any number of ranks."""
