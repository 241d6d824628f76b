"""From raw data to a federation file: ``sources`` and ``synthetic`` make a `Dataset`, ``partition`` assigns its samples
to clients, ``write`` stores the result. Nothing here needs torch or MPI."""
