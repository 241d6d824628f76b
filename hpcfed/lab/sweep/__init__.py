"""Sweeps: runs of one recipe over grids × seeds, distributed to groups of ranks in one or more jobs, then compared."""
