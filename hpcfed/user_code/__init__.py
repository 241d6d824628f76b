"""The user's own code: which modules it is, whose error an exception is, and checks of what a method answers."""
