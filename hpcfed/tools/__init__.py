"""Tools around a run: benchmarks, and the estimate of what a recipe will take."""
