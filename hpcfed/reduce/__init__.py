"""The one reduction of a round: the buffer's layout, and the exact sums in it."""
