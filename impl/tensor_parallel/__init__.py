"""Megatron tensor parallelism and sequence parallelism: layers that share their matrices between ranks."""
