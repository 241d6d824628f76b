"""Batch jobs: scripts written from a recipe and a site file, submitted once, and requeued or chained until done."""
