"""Fixtures of tests of sweeps."""

from tests.harness.calls import no_gpu

__all__ = ["no_gpu"]
