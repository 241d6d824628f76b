"""Batch scripts for SLURM: written from a recipe and a site file, submitted once, requeued or chained until done."""
