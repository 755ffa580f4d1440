"""Accounts in the replicated state, with their permissions, and global white addresses.

Texts are RocketMQ's: of ACL 1.0 (``PUB|SUB``) in lines and defaults, of ACL 2.0 (``Topic:orders``,
``Pub``, ``Allow``) in policies. What they mean is decided elsewhere; here they are kept.

A secret is kept as it is, because signatures are made with it. It is in no `repr`.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """One entry of a policy of ACL 2.0.

    Attributes:
        resource: ``Topic:NAME``, ``Group:NAME``, a name may end in ``*``; or ``*``.
        source_ips: Addresses and networks it is about; none: all.
    """

    policy_type: str
    resource: str
    actions: tuple[str, ...]
    source_ips: tuple[str, ...]
    decision: str

    def to_state(self) -> list[Any]:
        """Return the CBOR form of a state record."""
        return [
            self.policy_type,
            self.resource,
            list(self.actions),
            list(self.source_ips),
            self.decision,
        ]

    @classmethod
    def from_state(cls, value: list[Any]) -> Self:
        """Read what `to_state` made."""
        policy_type, resource, actions, source_ips, decision = value
        return cls(policy_type, resource, tuple(actions), tuple(source_ips), decision)


@dataclass(frozen=True, slots=True)
class AccountConfig:
    """One account. The secret is not in its repr.

    *enabled*: off: requests in its name are refused as with a wrong signature.
    """

    access_key: str
    secret_key: str = field(repr=False)
    admin: bool = False
    enabled: bool = True
    white_address: str = ""
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topics: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    policies: tuple[PolicyConfig, ...] = ()

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record; it holds the secret."""
        return {
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "admin": self.admin,
            "enabled": self.enabled,
            "white_address": self.white_address,
            "default_topic_perm": self.default_topic_perm,
            "default_group_perm": self.default_group_perm,
            "topics": dict(self.topics),
            "groups": dict(self.groups),
            "policies": [policy.to_state() for policy in self.policies],
        }

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made.

        Raises KeyError, TypeError, ValueError: a field is missing or not known here.
        """
        policies = tuple(PolicyConfig.from_state(item) for item in value["policies"])
        return cls(**{**value, "policies": policies})


@dataclass(frozen=True, slots=True)
class AccessChange:
    """Accounts put as a whole, accounts deleted, and the global white addresses.

    Attributes:
        white_addresses: None: they stay as they are.
        asked_by: The requester.
    """

    put: tuple[AccountConfig, ...] = ()
    delete: tuple[str, ...] = ()
    white_addresses: str | None = None
    asked_by: str = ""

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record; it holds the secrets."""
        state: dict[str, Any] = {
            "put": [account.to_state() for account in self.put],
            "delete": list(self.delete),
            "asked_by": self.asked_by,
        }
        if self.white_addresses is not None:
            state["white_addresses"] = self.white_addresses
        return state

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made."""
        return cls(
            tuple(AccountConfig.from_state(item) for item in value["put"]),
            tuple(value["delete"]),
            value.get("white_addresses"),
            value["asked_by"],
        )


def apply_accounts(accounts: dict[str, AccountConfig], change: AccessChange) -> set[str]:
    """Bring *accounts* to what they are behind *change*; return the names it is about."""
    for account in change.put:
        accounts[account.access_key] = account
    for name in change.delete:
        accounts.pop(name, None)
    return {account.access_key for account in change.put} | set(change.delete)
