"""Predictions for a run: described systems, simulated steps and memory, and the accuracy of predictions.

May import every room on a lower floor of docs/code.md, up to harness.experiment.
"""
