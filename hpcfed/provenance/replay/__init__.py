"""One client of one round of a recorded run, trained again in one process: step by step, to the same bits."""
