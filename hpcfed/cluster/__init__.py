"""Tools for clusters: diagnosis of a job, batch scripts, and estimates of a run's memory, traffic and time."""
