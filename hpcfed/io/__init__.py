"""Bounded reading of untrusted text, atomic writing of files, and terminal output that cannot end a run."""
