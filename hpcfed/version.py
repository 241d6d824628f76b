"""The version, kept apart so that reading it imports nothing."""

__version__ = "0.2.0.dev0"
