"""Replay: one client of one round of a recorded run, trained again step by step in one process, to the same bits."""
