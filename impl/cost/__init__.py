"""Closed formulas of the papers: parameters and floating-point operations."""
