"""Timings of parts and of peers, side by side in one run, against a kept baseline.

May import every room on a lower floor of docs/code.md, up to harness.launch.
"""
