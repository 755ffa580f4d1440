"""Holders of queues in the replicated state: grants with fencing tokens.

A grant is an entry of the log, and the index of that entry is its token: a later grant of the same
queue has a larger one, under any leader. Leases are not here: time is no part of the replicated
state.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dledger.commitlog.errors import InvariantBroken

LockKey = tuple[str, str, int]
"""Consumer group, topic, queue id."""

NO_TOKEN = 0
"""No grant: the log's first index is 1."""


@dataclass(frozen=True, slots=True)
class QueueLock:
    """A grant that stands."""

    client_id: str
    token: int


@dataclass(frozen=True, slots=True)
class LockGrant:
    """A queue given to a client.

    ``replaces`` is the token of the grant that ends with it, `NO_TOKEN` for a free queue: apply
    stops the node when another one stands there.
    """

    key: LockKey
    client_id: str
    replaces: int = NO_TOKEN


@dataclass(frozen=True, slots=True)
class LockRelease:
    """A queue given back; ``token`` is that of the grant that stands."""

    key: LockKey
    token: int


@dataclass(frozen=True, slots=True)
class QueueLocksChange:
    """Queues given back and queues granted. What is given back comes first."""

    releases: tuple[LockRelease, ...] = ()
    grants: tuple[LockGrant, ...] = ()

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        return {
            "release": [[*release.key, release.token] for release in self.releases],
            "grant": [[*grant.key, grant.client_id, grant.replaces] for grant in self.grants],
        }

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> QueueLocksChange:
        """Read what `to_state` made."""
        return cls(
            tuple(
                LockRelease((group, topic, queue_id), token)
                for group, topic, queue_id, token in value["release"]
            ),
            tuple(
                LockGrant((group, topic, queue_id), client_id, replaces)
                for group, topic, queue_id, client_id, replaces in value["grant"]
            ),
        )


def apply_queue_locks(
    locks: dict[LockKey, QueueLock], change: QueueLocksChange, index: int
) -> None:
    """Bring *locks* to what they are behind the entry *index*.

    Raises InvariantBroken: another grant stands where the change has its own, or one entry grants a
    queue twice, so that two holders would have one token. *locks* may be half changed.
    """
    for release in change.releases:
        _expect(locks, release.key, release.token, index)
        del locks[release.key]
    for grant in change.grants:
        _expect(locks, grant.key, grant.replaces, index)
        locks[grant.key] = QueueLock(grant.client_id, index)


def _expect(locks: Mapping[LockKey, QueueLock], key: LockKey, token: int, index: int) -> None:
    lock = locks.get(key)
    stands = NO_TOKEN if lock is None else lock.token
    if stands != token or stands >= index:
        raise InvariantBroken(
            f"entry {index} ends grant {token} of {key}, but grant {stands} stands there"
        )


def drop_topic(locks: dict[LockKey, QueueLock], topic: str) -> list[LockKey]:
    """Forget the grants of a deleted topic, and return their keys."""
    gone = [key for key in locks if key[1] == topic]
    for key in gone:
        del locks[key]
    return gone


def locks_from_state(
    tree: Mapping[str, Mapping[str, Mapping[int, list[Any]]]],
) -> dict[LockKey, QueueLock]:
    """Return the grants in a snapshot."""
    return {
        (group, topic, queue_id): QueueLock(*lock)
        for group, topics in tree.items()
        for topic, queues in topics.items()
        for queue_id, lock in queues.items()
    }
