"""Evaluation: loss, accuracy and metrics of a model on the test set, the training sets, and each client's samples."""
