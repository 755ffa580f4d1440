"""Accounts in the replicated state, with their permissions, and global white addresses.

Texts are RocketMQ's: of ACL 1.0 (``PUB|SUB``) in lines and defaults, of ACL 2.0 (``Topic:orders``,
``Pub``, ``Allow``) in policies. What they mean is decided elsewhere; here they are kept.

A secret is kept as it is, because signatures are made with it. It is in no `repr`.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from dledger.state.table import Form, StateChange


class PolicyConfig(NamedTuple):
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


class AccountConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One account. The secret is not in its repr.

    *enabled*: off: requests in its name are refused as with a wrong signature.
    """

    access_key: str
    secret_key: str
    admin: bool = False
    enabled: bool = True
    white_address: str = ""
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topics: Mapping[str, str] = msgspec.field(default_factory=dict)
    groups: Mapping[str, str] = msgspec.field(default_factory=dict)
    policies: tuple[PolicyConfig, ...] = ()

    def __repr__(self) -> str:
        return f"AccountConfig(access_key={self.access_key!r})"


ACCOUNTS: Final = Form[str, AccountConfig]("accounts", str, AccountConfig)


class AccessChange(StateChange, frozen=True):
    """Accounts put as a whole, accounts deleted, and the global white addresses.

    Attributes:
        white_addresses: None: they stay as they are.
        asked_by: The requester.
    """

    put: tuple[AccountConfig, ...] = ()
    delete: tuple[str, ...] = ()
    white_addresses: str | None = None
    asked_by: str = ""


def apply_accounts(accounts: dict[str, AccountConfig], change: AccessChange) -> None:
    """Bring *accounts* to what they are behind *change*."""
    for account in change.put:
        accounts[account.access_key] = account
    for name in change.delete:
        accounts.pop(name, None)
