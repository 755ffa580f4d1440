"""Settings of the unit tests."""

from __future__ import annotations

from tests.harness.hypothesis_profile import use_shared_machine
from tests.harness.quick_flushes import quick_flushes
from tests.harness.virtual_time import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "quick_flushes"]

use_shared_machine()
