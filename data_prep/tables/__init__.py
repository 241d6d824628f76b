"""Tables of one's own: columns found by name, cells turned into numbers, statistics of training rows."""
