"""Readers of raw data, one file a format; each returns a `data_prep.dataset.Dataset`."""
