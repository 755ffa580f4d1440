"""Settings of Hypothesis for tests that share the processors with each other."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def use_shared_machine() -> None:
    """Bound no example and no drawing in real time: that would judge the other work of the machine.

    What Hypothesis does by itself where ``CI`` is set, but drawing something new in every run.
    The timeout of a test bounds all of its examples.
    """
    settings.register_profile(
        "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("shared machine")
