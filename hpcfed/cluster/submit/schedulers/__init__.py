"""Schedulers as used to submit jobs: one module each, with the functions of `hpcfed.cluster.submit.scheduler`."""
