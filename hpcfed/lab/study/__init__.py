"""Studies of a few sites: methods and baselines compared over seeds and splits, in tables and one HTML page."""
