"""ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054)."""
