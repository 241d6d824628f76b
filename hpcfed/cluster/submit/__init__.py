"""SLURM batch scripts: written from a recipe and a site file, submitted once, requeued or chained until done."""
