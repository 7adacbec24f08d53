"""Checks of a machine or cluster before a sweep, with two or more ranks.

May import every room on a lower floor of docs/code.md, up to harness.launch.
"""
