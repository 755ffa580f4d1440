"""What a request must be allowed to do: one rule for each request code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from remoting.access.accounts import Right
from remoting.protocol.command import RemotingCommand

Rights: TypeAlias = Callable[[RemotingCommand], Iterable[Right]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What stands between a request whose signature is right and its handler.

    Attributes:
        admin: Only an administrator's account may ask.
        rights: What the account needs for what stands in the request; None: nothing.
    """

    admin: bool = False
    rights: Rights | None = None


SIGNED: Final = Rule()
"""A right signature is enough."""

ADMIN: Final = Rule(admin=True)
"""For administrators. Also the rule of a code without a rule."""
