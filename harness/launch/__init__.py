"""Sweeps: points are started under a claim, on this machine or by Slurm, and watched until each has a record.

May import every room on a lower floor of docs/code.md, up to harness.predict.
"""
