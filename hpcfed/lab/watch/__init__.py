"""Live view of runs in the terminal, while they go on or afterwards; reads only their folders."""
