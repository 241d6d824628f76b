"""Reading text of other people within bounds, writing files whole or not at all, and output that ends no run."""
