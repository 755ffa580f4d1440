"""Names of files beside the rows of a history."""

from __future__ import annotations

from typing import Final

PUSH_RECORD: Final = "push_group.json"
"""What is known of a push group when a run is over, so that it can be judged again."""
