"""Reports on many sweeps: EXPERIMENTS.md, the site, archives, and the results that a verb prints.

May import every room on a lower floor of docs/code.md, up to harness.tune.
"""
