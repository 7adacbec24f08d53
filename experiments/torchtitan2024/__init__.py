"""Experiments of TorchTitan (Liang et al. 2024, arXiv 2410.06511): Llama 3.1 on PyTorch's own parallelism."""
