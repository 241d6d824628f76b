"""Fuzzing: random inputs, read as a user's files are, in child processes with limits of memory and time."""
