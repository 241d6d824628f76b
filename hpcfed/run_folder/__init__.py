"""The run folder: what may be started in it, its record and code, how a run ended, and progress while it goes on."""
