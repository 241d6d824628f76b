"""Schedulers, seen from a job that runs: one file each, with the functions of `hpcfed.cluster.step.scheduler`."""
