"""Schedulers as used to submit jobs: a module each, with the functions of `hpcfed.cluster.submit.scheduler`."""
