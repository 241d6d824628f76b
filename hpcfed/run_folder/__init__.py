"""The run folder: whether a run may start in it, its record, its user code, its end, and progress on the terminal."""
