"""Accounts and what each may do; pure.

A right is asked for as *publish* or *subscribe* on a topic or a consumer group. An account grants
the permission on its own line about that name; where it has none, its default for topics or for
groups. Policies, of ACL 2.0, are asked first. A consumer group is named by its retry topic in
RocketMQ, so a right to that topic is a right to the group. Each request code has one rule.

From a white address an account, or any client, needs no signature. A pattern is an address,
``a.b.c.*``, a range in an octet (``a.b.c.10-20``), a choice of last octets (``a.b.c.{10,11}``), or
``*``; several stand one after the other with ``,`` or ``;`` between them. IPv6 addresses are
compared whole.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Final, NamedTuple, Protocol, TypeAlias

from dledger.remoting.addresses import numeric
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX, holds_of_others

PATTERNS_MAX: Final = 1_000
"""Patterns in one list: each is looked at for every request that none before it fits."""

_CHOICE: Final = re.compile(r"(?P<head>[^{}]*\.)\{(?P<octets>[^{}]*)\}")
_PARTS: Final = re.compile(r"(?:[^;,{}]|\{[^{}]*\}|[{}])+")
_OCTET: Final = re.compile("[0-9]{1,3}")
_OCTETS: Final = 4
_OCTET_MAX: Final = 255

# Lowest and highest value of each octet.
_Ranges: TypeAlias = tuple[tuple[int, int], ...]


class WhiteAddresses:
    """A list of patterns, ready to be asked about addresses."""

    __slots__ = ("_anybody", "_exact", "_ranges", "text")

    def __init__(self, text: str = "") -> None:
        """Read a list. Raises ValueError: one pattern is none; names it."""
        self.text = text
        self._anybody = False
        self._exact: set[str] = set()
        self._ranges: list[_Ranges] = []
        patterns = _split(text)
        if len(patterns) > PATTERNS_MAX:
            raise ValueError(f"{len(patterns)} address patterns, at most {PATTERNS_MAX}")
        for pattern in patterns:
            self._add(pattern)
            # A choice of octets is as many patterns.
            if len(self._exact) + len(self._ranges) > PATTERNS_MAX:
                raise ValueError(f"more than {PATTERNS_MAX} address patterns")

    def __bool__(self) -> bool:
        return self._anybody or bool(self._exact) or bool(self._ranges)

    def _add(self, pattern: str) -> None:
        if pattern in ("*", "*.*.*.*"):
            self._anybody = True
            return
        choice = _CHOICE.fullmatch(pattern)
        if choice is not None:
            octets = choice["octets"].split(",")
            if len(octets) > PATTERNS_MAX:
                raise ValueError(f"{len(octets)} address patterns, at most {PATTERNS_MAX}")
            for octet in octets:
                self._ranges.append(_ranges(choice["head"] + octet.strip(), pattern))
            return
        if ":" in pattern:
            try:
                self._exact.add(str(ipaddress.IPv6Address(pattern.strip("[]"))))
            except ValueError:
                raise ValueError(f"{pattern!r} is not an address") from None
            return
        ranges = _ranges(pattern, pattern)
        if all(low == high for low, high in ranges):
            self._exact.add(".".join(str(low) for low, _ in ranges))
        else:
            self._ranges.append(ranges)

    def fits(self, host: str) -> bool:
        """Whether one of the patterns is about *host*, a numeric address."""
        if self._anybody:
            return True
        address = numeric(host)
        octets = b"" if address is None else address.packed
        return str(address) in self._exact or any(
            len(octets) == _OCTETS
            and all(low <= octet <= high for (low, high), octet in zip(ranges, octets, strict=True))
            for ranges in self._ranges
        )


def _split(text: str) -> list[str]:
    """Cut at commas and semicolons that do not stand in braces."""
    return [part.strip() for part in _PARTS.findall(text) if part.strip()]


def _ranges(text: str, shown: str) -> _Ranges:
    octets = text.split(".")
    if len(octets) != _OCTETS:
        raise ValueError(f"{shown!r} is not an address, nor a pattern of addresses")
    found: list[tuple[int, int]] = []
    for octet in octets:
        low, dash, high = octet.partition("-")
        if octet == "*":
            found.append((0, _OCTET_MAX))
            continue
        ends = (low, high) if dash else (octet, octet)
        if not all(_OCTET.fullmatch(end) and int(end) <= _OCTET_MAX for end in ends):
            raise ValueError(f"{shown!r} is not an address, nor a pattern of addresses")
        first, last = int(ends[0]), int(ends[1])
        if first > last:
            raise ValueError(f"{shown!r}: {octet} runs backwards")
        found.append((first, last))
    return tuple(found)


KEY_LENGTH_MIN: Final = 7
"""Characters of a secret key. RocketMQ's ACL 1.0 wants as many of an access key."""


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

    Raises ValueError: something else. RocketMQ takes that for DENY; here it is an error.
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
    other topics. Where no line names it the right to *group* decides, if there is one.
    """

    name: str
    permission: Permission
    is_group: bool = False
    by_line: bool = False
    group: str = ""


def topic_right(topic: str, permission: Permission) -> Right:
    """Return the right to a topic; a group's retry topic stands for the group itself.

    Its dead letters do where no line names their topic: one to read them makes no consumer.
    No default grants a right to what holds messages of other topics.
    """
    if topic.startswith(RETRY_PREFIX):
        return group_right(topic)
    if holds_of_others(topic):
        return Right(topic, permission, by_line=True)
    if topic.startswith(DLQ_PREFIX):
        return Right(topic, permission, by_line=True, group=topic.removeprefix(DLQ_PREFIX))
    return Right(topic, permission)


def group_right(group: str) -> Right:
    """Return the right to consume as *group*, also when its retry topic is named."""
    return Right(group.removeprefix(RETRY_PREFIX), Permission.SUB, is_group=True)


class DecidesFirst(Protocol):
    """What an account's lines and defaults come after."""

    def decide(self, right: Right, host: str) -> bool | None:
        """Return whether *right* is granted to *host*; None: it is not decided here."""


@dataclass(frozen=True, slots=True)
class Account:
    """One account. The secret is not in its repr.

    Attributes:
        is_enabled: Off: it is as if there were no such account.
        policies: What they decide, lines and defaults do not; None: there are none.
        white: From there this account needs no signature, and no permission.
        is_admin: May use administrative requests; without any lines of its own, everything.
    """

    access_key: str
    secret_key: str = field(repr=False)
    is_admin: bool = False
    white: WhiteAddresses = field(default_factory=WhiteAddresses, repr=False)
    default_topic: Permission = Permission.DENY
    default_group: Permission = Permission.DENY
    topics: Mapping[str, Permission] = field(default_factory=dict)
    groups: Mapping[str, Permission] = field(default_factory=dict)
    is_enabled: bool = True
    policies: DecidesFirst | None = field(default=None, repr=False)

    def allows(self, right: Right, host: str = "") -> bool:
        """Whether the account has *right*, from *host*, which policies may name."""
        if self.is_admin and not self.topics and not self.groups:
            return True
        if self.policies is not None:
            decided = self.policies.decide(right, host)
            if decided is not None:
                return decided
        lines = self.groups if right.is_group else self.topics
        granted = lines.get(right.name)
        if granted is None:
            if right.group:
                return self.allows(group_right(right.group), host)
            if right.by_line:
                return self.is_admin
            granted = self.default_group if right.is_group else self.default_topic
        return granted.allows(right.permission)


class AccountSource(Protocol):
    """Where accounts are looked up, for each request."""

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""

    def is_white(self, host: str) -> bool:
        """Whether requests from *host* need no signature."""


@dataclass(frozen=True, slots=True)
class AccountTable:
    """All accounts of a file, by access key, and the addresses that need none."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    white: WhiteAddresses = field(default_factory=WhiteAddresses)

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""
        return self.accounts.get(access_key)

    def is_white(self, host: str) -> bool:
        """Whether requests from *host* need no signature."""
        return self.white.fits(host)

    def __iter__(self) -> Iterator[Account]:
        return iter(self.accounts.values())

    def __len__(self) -> int:
        return len(self.accounts)


def table_changes(before: AccountTable, after: AccountTable) -> dict[str, list[str]]:
    """Return the names of accounts that were added, changed and removed; pure, no secret in it."""
    old, new = before.accounts, after.accounts
    names = {
        "added": new.keys() - old.keys(),
        "changed": {
            name for name in new.keys() & old.keys() if _facts(old[name]) != _facts(new[name])
        },
        "removed": old.keys() - new.keys(),
    }
    return {kind: sorted(some) for kind, some in names.items() if some}


def _facts(account: Account) -> tuple[object, ...]:
    return (
        account.secret_key,
        account.is_admin,
        account.white.text,
        account.default_topic,
        account.default_group,
        account.topics,
        account.groups,
    )


Rights: TypeAlias = Callable[[RemotingCommand], Iterable[Right]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What stands between a request whose signature is right and its handler."""

    admin: bool = False
    rights: Rights | None = None


SIGNED: Final = Rule()
"""A right signature is enough."""

ADMIN: Final = Rule(admin=True)
"""For administrators. Also the rule of a code without a rule."""
