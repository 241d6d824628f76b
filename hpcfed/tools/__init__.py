"""Tools around a run: benchmarks, and the estimate of a recipe's time and memory."""
