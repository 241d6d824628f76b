"""User code: its modules and their sources, the errors it raises, and checks of a user's method."""
