"""``hpcfed job-step``, a batch job's one command: start the ranks, pass signals on, send the job back into the queue.

It imports little, since it starts in every job before the ranks do.
"""
