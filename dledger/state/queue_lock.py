"""Holders of queues in the replicated state: grants with fencing tokens.

A grant is an entry of the log, and the index of that entry is its token: a later grant of the same
queue has a larger one, under any leader. Leases are not here: time is no part of the replicated
state.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from dledger.commitlog.errors import InvariantBroken
from dledger.state.table import Form, StateChange

LockKey = tuple[str, str, int]
"""Consumer group, topic, queue id."""

NO_TOKEN = 0
"""No grant: the log's first index is 1."""


class QueueLock(NamedTuple):
    """A grant that stands."""

    client_id: str
    token: int


QUEUE_LOCKS: Final = Form[LockKey, QueueLock]("queue_locks", LockKey, QueueLock, names=(0, 1))


class LockGrant(NamedTuple):
    """A queue given to a client.

    ``replaces`` is the token of the grant that ends with it, `NO_TOKEN` for a free queue: apply
    stops the node when another one stands there.
    """

    key: LockKey
    client_id: str
    replaces: int = NO_TOKEN


class LockRelease(NamedTuple):
    """A queue given back; ``token`` is that of the grant that stands."""

    key: LockKey
    token: int


class QueueLocksChange(StateChange, frozen=True):
    """Queues given back and queues granted. What is given back comes first."""

    releases: tuple[LockRelease, ...] = ()
    grants: tuple[LockGrant, ...] = ()


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
