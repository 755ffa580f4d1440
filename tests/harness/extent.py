"""How far the tests go that could go on for hours: seeds, drawn plans and histories."""

import os
from typing import Final

EXTENT: Final = int(os.environ.get("DLEDGER_TEST_EXTENT", "1"))
"""1 is what `make test` takes; `make hunt` takes more of each kind."""

FAST_PART: Final = 4


def examples(count: int) -> int:
    """Return how many examples a property draws: *count* in a hunt, else fewer.

    For fast properties whose examples take long.
    """
    return count if EXTENT > 1 else -(-count // FAST_PART)
