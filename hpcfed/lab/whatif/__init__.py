"""Bit-exact counterfactual runs without some clients; clients' leave-one-out and Shapley values."""
