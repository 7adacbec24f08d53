"""A sweep: which points to start, on this machine or by Slurm, under a claim, watched until each has a record.

May import every room on a lower floor of docs/code.md, up to harness.predict.
"""
