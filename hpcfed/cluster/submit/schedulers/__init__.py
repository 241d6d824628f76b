"""Schedulers by name, a file each (`hpcfed.cluster.submit.scheduler`)."""
