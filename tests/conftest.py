"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("no deadlines", deadline=None)  # machines that run tests are shared: time is not a fault
settings.load_profile("no deadlines")
