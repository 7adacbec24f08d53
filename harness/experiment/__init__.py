"""Experiments: runs, claims and verdicts, published numbers, comparisons, and folders of results.

May import impl, harness.records, harness.analysis and harness.terminal.
"""
