"""Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198)."""
