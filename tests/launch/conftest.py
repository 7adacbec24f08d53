"""Fixtures of tests of sweeps."""

from tests.harness.calls import no_gpu, tokens

__all__ = ["no_gpu", "tokens"]
