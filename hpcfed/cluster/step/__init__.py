"""The command ``hpcfed job-step`` of a batch job: start the ranks, pass signals on to them, and requeue the job.

The package imports little, because every job starts it before the ranks.
"""
