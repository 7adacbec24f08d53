"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241)."""
