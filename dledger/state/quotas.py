"""Quotas in the replicated state: what an account or a client may use of each broker.

What they mean is decided elsewhere; here they are kept.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

ACCOUNT: Final = "account"
"""Of an account, named by its access key."""
CLIENT: Final = "client"
"""Of a client that has no account, named by its id, or by its address."""
KINDS: Final = (ACCOUNT, CLIENT)


def quota_key(kind: str, name: str) -> str:
    """Return what a quota is found by; without a name it is the default of its kind."""
    return f"{kind}:{name}"


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """One quota. None: without that limit.

    Attributes:
        kind: One of `KINDS`.
        name: Of the account or client; empty: of each that has no quota of its own.
        sent_messages_per_s: A batch counts by its messages.
        sent_bytes_per_s: Of the bodies of sends.
        received_messages_per_s: Of pulls and POP.
        received_bytes_per_s: Of records, as they are given out.
        connections: Open at one time.
    """

    kind: str
    name: str
    sent_messages_per_s: int | None = None
    sent_bytes_per_s: int | None = None
    received_messages_per_s: int | None = None
    received_bytes_per_s: int | None = None
    connections: int | None = None

    @property
    def key(self) -> str:
        """What it is found by."""
        return quota_key(self.kind, self.name)

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record: limits that are not set are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made.

        Raises:
            TypeError: A field is missing or not known here.
        """
        return cls(**value)


@dataclass(frozen=True, slots=True)
class QuotasChange:
    """Quotas put as a whole, and keys of quotas deleted.

    Attributes:
        asked_by: The requester.
    """

    put: tuple[QuotaConfig, ...] = ()
    delete: tuple[str, ...] = ()
    asked_by: str = ""

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        return {
            "put": [quota.to_state() for quota in self.put],
            "delete": list(self.delete),
            "asked_by": self.asked_by,
        }

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made.

        Raises:
            KeyError, TypeError: A field is missing or not known here.
        """
        return cls(
            tuple(QuotaConfig.from_state(item) for item in value["put"]),
            tuple(value["delete"]),
            value["asked_by"],
        )


def apply_quotas(quotas: dict[str, QuotaConfig], change: QuotasChange) -> set[str]:
    """Bring *quotas* to what they are behind *change*; return the keys it is about.

    What is put comes first. A quota that is not there is deleted already.
    """
    for quota in change.put:
        quotas[quota.key] = quota
    for key in change.delete:
        quotas.pop(key, None)
    return {quota.key for quota in change.put} | set(change.delete)
