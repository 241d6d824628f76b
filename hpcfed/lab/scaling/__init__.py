"""Scaling studies: the time of a round over the number of ranks, measured, modelled and predicted."""
