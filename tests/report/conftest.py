"""Fixtures of all tests of reports."""

from tests.harness.calls import elsewhere

__all__ = ["elsewhere"]
