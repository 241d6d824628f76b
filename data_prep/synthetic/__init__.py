"""Generators of synthetic federations, one file a paper's data set; each returns a `data_prep.dataset.Dataset`."""
