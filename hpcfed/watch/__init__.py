"""Runs in the terminal while they go on, or afterwards: reads their folders and nothing alive."""
