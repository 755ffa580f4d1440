"""Accounts and what each may do; pure.

A right is asked for as *publish* or *subscribe* on a topic or a consumer group. An account grants
the permission on its own line about that name; where it has none, its default for topics or for
groups. A consumer group is named by its retry topic in RocketMQ, so a right to that topic is a
right to the group.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Final, NamedTuple

from remoting.access.addresses import WhiteAddresses

RETRY_PREFIX: Final = "%RETRY%"

KEY_LENGTH_MIN: Final = 7
"""Characters of an access key and of a secret key: RocketMQ takes no shorter ones."""


class Permission(Flag):
    """What may be done with a topic or a group. DENY forbids whatever stands beside it."""

    NONE = 0
    DENY = 1
    PUB = 4
    SUB = 8

    def allows(self, needed: Permission) -> bool:
        """Whether this grants *needed*, which is PUB or SUB."""
        return not self & Permission.DENY and bool(self & needed)

    def __str__(self) -> str:
        named = [kind.name for kind in (Permission.PUB, Permission.SUB) if kind in self]
        return "DENY" if Permission.DENY in self or not named else "|".join(map(str, named))


def parse_permission(text: str) -> Permission:
    """Return the permission that ``DENY``, ``PUB``, ``SUB`` or ``PUB|SUB`` spells.

    Raises:
        ValueError: Something else. RocketMQ takes that for DENY; here it is an error.
    """
    found = Permission.NONE
    for part in text.split("|"):
        kind = _PERMISSIONS.get(part.strip())
        if kind is None:
            raise ValueError(f"{text!r} is not DENY, PUB, SUB or PUB|SUB")
        found |= kind
    return found


_PERMISSIONS: Final[Mapping[str, Permission]] = {
    "DENY": Permission.DENY,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
}


class Right(NamedTuple):
    """What a request needs: *permission* on the topic or, if *is_group*, the consumer group.

    With *by_line* no default grants it: a topic of the broker's own that holds what is sent in
    other topics.
    """

    name: str
    permission: Permission
    is_group: bool = False
    by_line: bool = False


def topic_right(topic: str, permission: Permission, *, by_line: bool = False) -> Right:
    """Return the right to a topic; a group's retry topic stands for the group itself."""
    if topic.startswith(RETRY_PREFIX):
        return group_right(topic)
    return Right(topic, permission, by_line=by_line)


def group_right(group: str) -> Right:
    """Return the right to consume as *group*, also when its retry topic is named."""
    return Right(group.removeprefix(RETRY_PREFIX), Permission.SUB, is_group=True)


@dataclass(frozen=True, slots=True)
class Account:
    """One account. The secret is not in its repr.

    Attributes:
        white: From there this account needs no signature, and no permission.
        is_admin: May use administrative requests; without any lines of its own, everything.
        topics: Permission of each topic that has a line of its own.
        groups: The same of consumer groups.
    """

    access_key: str
    secret_key: str = field(repr=False)
    is_admin: bool = False
    white: WhiteAddresses = field(default_factory=WhiteAddresses, repr=False)
    default_topic: Permission = Permission.DENY
    default_group: Permission = Permission.DENY
    topics: Mapping[str, Permission] = field(default_factory=dict)
    groups: Mapping[str, Permission] = field(default_factory=dict)

    def allows(self, right: Right) -> bool:
        """Whether the account has *right*."""
        lines = self.groups if right.is_group else self.topics
        granted = lines.get(right.name)
        if granted is None:
            if self.is_admin and not self.topics and not self.groups:
                return True
            if right.by_line:
                return self.is_admin
            granted = self.default_group if right.is_group else self.default_topic
        return granted.allows(right.permission)


@dataclass(frozen=True, slots=True)
class AccountTable:
    """All accounts of a file, by access key, and the addresses that need none."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    white: WhiteAddresses = field(default_factory=WhiteAddresses)

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""
        return self.accounts.get(access_key)

    def __iter__(self) -> Iterator[Account]:
        return iter(self.accounts.values())

    def __len__(self) -> int:
        return len(self.accounts)
