"""What would have been: recorded runs without some of their clients, to the bit."""
