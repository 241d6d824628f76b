"""Counterfactual runs without some clients, to the bit; clients' leave-one-out and Shapley values."""
