"""A client's round: the local solver, one client after another or many at once, and the states that clients keep."""
