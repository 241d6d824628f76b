"""Losses and accuracies of a model: on the test and training sets, and on each client's own samples."""
