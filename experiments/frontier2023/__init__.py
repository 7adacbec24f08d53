"""Optimizing Distributed Training on Frontier for Large Language Models (arXiv 2312.12705)."""
