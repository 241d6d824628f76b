"""Schedulers as used from inside a job: one module each, with the functions of `hpcfed.cluster.step.scheduler`."""
