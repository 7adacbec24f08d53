"""Figures of many records: style, curves, scaling, perplexity and pipeline timelines.

May import impl, harness.records and harness.analysis.
"""
