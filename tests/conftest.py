"""Hypothesis profiles: the same cases in every run by default, many and new ones for `make fuzz`."""

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "long",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")
