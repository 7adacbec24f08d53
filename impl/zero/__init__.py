"""Data parallelism: how gradients, and later optimizer states and parameters, are shared out."""
