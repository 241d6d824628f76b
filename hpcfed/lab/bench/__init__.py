"""Benchmarks of rounds, start-up and reductions against minimal programs, timed in turn: medians and ratios."""
