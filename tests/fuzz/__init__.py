"""Inputs that nobody meant, made at random and read as a user's, in children with limits of memory and time."""
