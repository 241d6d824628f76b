"""The run folder: whether a run may start in it, its record, checkpoints, code, certificate and end; observers."""
