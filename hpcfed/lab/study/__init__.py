"""Studies of a few sites: methods and baselines over seeds and splits, their tables, and one page."""
