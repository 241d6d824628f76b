"""Schedulers as used from inside a job: a module each, with the functions of `hpcfed.cluster.step.scheduler`."""
