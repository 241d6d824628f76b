"""What this machine and this MPI offer: facts, a few measurements, and what looks slow or wrong."""
