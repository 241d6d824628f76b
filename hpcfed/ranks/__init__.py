"""The ranks of a job: MPI, devices, signals and threads, and which rank trains which client."""
