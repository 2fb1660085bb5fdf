"""Hypothesis profiles: a few sequences in ``make test``, 4,000 in ``make test-long``."""

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "gradients-quick", max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile(
    "gradients-long", max_examples=2_000, stateful_step_count=40, deadline=None, suppress_health_check=_SLOW
)
