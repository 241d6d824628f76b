"""How the time of a round changes with the number of ranks: measured, modelled, and predicted beyond."""
