"""What Hypothesis may not measure here."""

from tests.harness.hypothesis_profile import use_shared_machine
from tests.harness.quick_flushes import quick_flushes

__all__ = ["quick_flushes"]

use_shared_machine()
