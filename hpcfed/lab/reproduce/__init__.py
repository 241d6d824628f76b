"""Reproduction of papers' experiments, one YAML file each in ``experiments``: data, runs, comparison with the paper."""
