"""The papers' experiments, one YAML file each under ``experiments``: prepared, run, and set beside the paper."""
