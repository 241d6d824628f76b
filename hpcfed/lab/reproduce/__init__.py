"""Reproduction of the papers' experiments, one YAML file each in ``experiments``: data, runs, comparison."""
