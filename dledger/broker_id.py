"""Under which number a member of a group is registered: the leader is always 0.

Spec: docs/internals/protocol/semantics.md, section 11.
"""

from __future__ import annotations

import re
from typing import Final

from commitlog.errors import ConfigError

LEADER_ID: Final = 0

_NUMBER: Final = re.compile(r"\d+")


def follower_id(self_id: str) -> int:
    """Return the broker id of a follower: the number in its id, plus one.

    Raises:
        ConfigError: There is no number in it.
    """
    number = _NUMBER.search(self_id)
    if number is None:
        raise ConfigError(f"self_id {self_id!r} must hold a number, such as n0")
    return int(number.group()) + 1
