"""Fixtures of all tests of the command line."""

from tests.harness.calls import elsewhere, no_gpu, no_start, out

__all__ = ["elsewhere", "no_gpu", "no_start", "out"]
