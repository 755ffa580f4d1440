"""What Hypothesis may not measure here."""

from __future__ import annotations

from tests.harness.hypothesis_profile import use_shared_machine

use_shared_machine()
