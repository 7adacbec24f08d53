"""Whether a machine or cluster is fit to train: checked before a sweep, with two or more ranks.

May import every room on a lower floor of docs/code.md, up to harness.launch.
"""
