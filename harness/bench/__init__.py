"""Timings of parts and of other engines, and their comparison with a kept baseline.

May import every room on a lower floor of docs/code.md, up to harness.launch.
"""
