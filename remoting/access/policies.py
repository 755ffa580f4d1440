"""Policies of RocketMQ's ACL 2.0: which entry decides about a right; pure.

An entry is about topics or consumer groups by name, by the begin of a name, or all of them; about
publishing, subscribing or both; and perhaps about some addresses only. The entry that fits best
decides: of a custom policy before those of a default one, about one kind before about everything, a
whole name before a begin, a longer begin before a shorter one, `Deny` before `Allow`.

Administration takes an account of type `Super`; an entry about it is an error.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from dledger.remoting.access.accounts import Permission, Right
from dledger.remoting.addresses import numeric

CUSTOM: Final = "Custom"
DEFAULT: Final = "Default"
ALLOW: Final = "Allow"
DENY: Final = "Deny"
ANY: Final = "*"
TOPIC: Final = "Topic"
GROUP: Final = "Group"

_ACTIONS: Final = {
    "all": ("All", Permission.PUB | Permission.SUB),
    "pub": ("Pub", Permission.PUB),
    "sub": ("Sub", Permission.SUB),
}
_OTHER_ACTIONS: Final = frozenset({"create", "update", "delete", "get", "list", "any"})
_KINDS: Final = {"topic": TOPIC, "group": GROUP}

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One entry of a policy.

    Attributes:
        is_default: It counts only where no entry of a custom policy fits.
        kind: ``Topic``, ``Group``, or ``*`` for both.
        name: Of the topic or group; with *is_prefix* its begin.
        sources: Addresses it is about; none: all.
    """

    is_default: bool
    kind: str
    name: str
    is_prefix: bool
    permission: Permission
    sources: tuple[Network, ...]
    allows: bool

    def fits(self, right: Right, host: str) -> bool:
        """Whether it decides about *right*, asked for from *host*."""
        if not self.permission & right.permission:
            return False
        if self.kind != ANY and (self.kind == GROUP) != right.is_group:
            return False
        if self.is_prefix:
            if not right.name.startswith(self.name) or (right.by_line and self.allows):
                return False
        elif right.name != self.name:
            return False
        address = numeric(host) if self.sources else None
        return not self.sources or any(address in network for network in self.sources if address)

    @property
    def rank(self) -> tuple[bool, bool, bool, int, bool]:
        """Of the entries that fit, the one with the least rank decides."""
        length = -len(self.name) if self.is_prefix else 0
        return (self.is_default, self.kind == ANY, self.is_prefix, length, self.allows)


class Policies:
    """The entries of one account, ready to be asked.

    Whole names are found by name: the cost of a question is that of the others.
    """

    __slots__ = ("_by_name", "_others")

    def __init__(self, entries: Sequence[PolicyEntry] = ()) -> None:
        """Take entries, in any order."""
        self._by_name: dict[str, list[PolicyEntry]] = {}
        self._others: list[PolicyEntry] = []
        for entry in sorted(entries, key=lambda entry: entry.rank):
            if entry.is_prefix:
                self._others.append(entry)
            else:
                self._by_name.setdefault(entry.name, []).append(entry)

    def decide(self, right: Right, host: str) -> bool | None:
        """Return whether the policies grant *right* to *host*; None: none is about it."""
        best: PolicyEntry | None = None
        for entries in (self._by_name.get(right.name, ()), self._others):
            for entry in entries:  # in the order of their rank
                if entry.fits(right, host):
                    if best is None or entry.rank < best.rank:
                        best = entry
                    break
        return None if best is None else best.allows


def parse_entry(
    policy_type: str,
    resource: str,
    actions: Sequence[str],
    source_ips: Sequence[str],
    decision: str,
) -> PolicyEntry:
    """Return the entry that RocketMQ's texts spell; upper and lower case are the same, as there.

    Raises ValueError: one of them is none, or about what policies do not decide here; it is named.
    """
    kind, name, is_prefix = _resource(resource)
    permission = Permission.NONE
    for action in actions:
        permission |= _ACTIONS[action_text(action).lower()][1]
    if not permission:
        raise ValueError("the actions are empty")
    sources = tuple(_network(text) for text in source_ips)
    return PolicyEntry(
        policy_type_text(policy_type) == DEFAULT,
        kind,
        name,
        is_prefix,
        permission,
        sources,
        decision_text(decision) == ALLOW,
    )


def policy_type_text(text: str) -> str:
    """Return ``Custom`` or ``Default``, as RocketMQ writes it; empty: ``Custom``."""
    return _one_of(text or CUSTOM, (CUSTOM, DEFAULT), "policy type")


def decision_text(text: str) -> str:
    """Return ``Allow`` or ``Deny``, as RocketMQ writes it."""
    return _one_of(text, (ALLOW, DENY), "decision")


def _one_of(text: str, choices: Sequence[str], what: str) -> str:
    for choice in choices:
        if text.lower() == choice.lower():
            return choice
    raise ValueError(f"{what} {text[:32]!r} is not {' or '.join(choices)}")


def action_text(text: str) -> str:
    """Return an action as RocketMQ writes it."""
    known = _ACTIONS.get(text.lower())
    if known is not None:
        return known[0]
    if text.lower() in _OTHER_ACTIONS:
        raise ValueError(
            f"action {text} is for administrators alone: make the user one, of type Super;"
            " policies are about Pub, Sub and All, which is both"
        )
    raise ValueError(f"action {text[:32]!r} is not Pub, Sub or All")


def resource_text(text: str) -> str:
    """Return a resource as RocketMQ writes it."""
    kind, name, is_prefix = _resource(text)
    return ANY if kind == ANY else f"{kind}:{name}{ANY if is_prefix else ''}"


def _resource(text: str) -> tuple[str, str, bool]:
    if text == ANY:
        return ANY, "", True
    written, colon, name = text.partition(":")
    kind = _KINDS.get(written.lower())
    if kind is None:
        if written.lower() == "cluster":
            raise ValueError(
                f"resource {text[:64]!r} is for administrators alone: make the user one, of type"
                " Super; policies are about Topic:NAME and Group:NAME"
            )
        raise ValueError(f"resource {text[:64]!r} is not Topic:NAME, Group:NAME or *")
    is_prefix = name.endswith(ANY)
    name = name.removesuffix(ANY)
    if not colon or ANY in name or (not name and not is_prefix):
        raise ValueError(f"resource {text[:64]!r} is not Topic:NAME, Group:NAME or *")
    return kind, name, is_prefix


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"source {text[:64]!r} is no address and no network") from None
