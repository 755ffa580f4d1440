"""How far the tests go that could go on for hours: seeds, drawn plans and histories."""

from __future__ import annotations

import os
from typing import Final

EXTENT: Final = int(os.environ.get("DLEDGER_TEST_EXTENT", "1"))
"""1 is what `make test` takes; `make test-long` takes more of each kind."""
