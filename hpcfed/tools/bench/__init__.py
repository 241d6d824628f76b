"""What rounds, starts and reductions cost beside the least they could: in turn, medians and ratios."""
