"""What is predicted of a run: described systems, simulated steps and memory, and how near predictions come.

May import every room on a lower floor of docs/code.md, up to harness.experiment.
"""
