"""Settings of Hypothesis for tests that share the processors with each other."""

from hypothesis import HealthCheck, settings

from tests.harness.extent import EXTENT, examples


def use_shared_machine() -> None:
    """Bound no example and no drawing in real time: that would judge the other work of the machine.

    Every run of the gate draws the same examples; a hunt draws new ones each time.
    """
    settings.register_profile(
        "shared machine",
        deadline=None,
        max_examples=examples(100),
        derandomize=EXTENT == 1,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("shared machine")
