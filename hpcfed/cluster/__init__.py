"""The machine beneath a run: diagnosis of a job, batch scripts, and estimates of memory, traffic and time."""
