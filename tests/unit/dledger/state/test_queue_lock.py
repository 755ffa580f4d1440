"""Grants in the tables: tokens are entry indexes, and nothing ends a grant that is not there."""

import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.state.queue_lock import (
    LockGrant,
    LockKey,
    LockRelease,
    QueueLock,
    QueueLocksChange,
    apply_queue_locks,
)
from dledger.state.state_record import TopicsChange
from tests.harness.fake_group import FakeGroup

KEY: LockKey = ("g", "T", 1)
OTHER: LockKey = ("g", "U", 0)


def test_the_token_of_a_grant_is_the_index_of_its_entry(group: FakeGroup) -> None:
    for client_id, replaces in (("a", 0), ("b", 1)):
        grants = (LockGrant(KEY, client_id, replaces), LockGrant(OTHER, client_id, replaces))
        group.store(QueueLocksChange(grants=grants))
    assert group.state.queue_locks == {KEY: QueueLock("b", 2), OTHER: QueueLock("b", 2)}


def test_one_entry_may_give_a_queue_from_one_to_another() -> None:
    locks = {KEY: QueueLock("a", 3)}
    apply_queue_locks(
        locks, QueueLocksChange((LockRelease(KEY, 3),), (LockGrant(KEY, "b"),)), index=4
    )
    assert locks == {KEY: QueueLock("b", 4)}


@pytest.mark.parametrize(
    "change",
    [
        QueueLocksChange(releases=(LockRelease(KEY, 2),)),
        QueueLocksChange(releases=(LockRelease(OTHER, 3),)),
        QueueLocksChange(grants=(LockGrant(KEY, "b"),)),
        QueueLocksChange(grants=(LockGrant(KEY, "b", 2),)),
        QueueLocksChange(grants=(LockGrant(KEY, "b", 3), LockGrant(KEY, "c", 4))),
        QueueLocksChange(grants=(LockGrant(OTHER, "b"), LockGrant(OTHER, "c"))),
    ],
)
def test_what_ends_a_grant_that_is_not_there_stops_the_node(change: QueueLocksChange) -> None:
    with pytest.raises(InvariantBroken, match="entry 4 ends grant"):
        apply_queue_locks({KEY: QueueLock("a", 3)}, change, index=4)


def test_the_grants_of_a_deleted_topic_go_with_it(group: FakeGroup) -> None:
    grants = (LockGrant(KEY, "a"), LockGrant(OTHER, "a"))
    group.store(QueueLocksChange(grants=grants))
    group.store(TopicsChange(delete=("T",)))
    assert list(group.state.queue_locks) == [OTHER]
