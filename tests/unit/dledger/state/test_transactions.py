"""Half messages in the tables: derived from entries, decided once, kept by snapshots."""

import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.state import transactions
from dledger.state.state_record import TransactionsChange
from dledger.state.transactions import OpenHalf, TransactionDecision, TransactionTable
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.fake_group import FakeGroup

COMMIT, ROLLBACK = TransactionDecision.COMMIT, TransactionDecision.ROLLBACK


def positions(group: FakeGroup, count: int) -> list[int]:
    units = group.queues.queue(HALF_TOPIC, 0).read(0, count)
    return [int(position) for position in units["phy_offset"].tolist()]


def test_what_comes_into_the_half_topic_is_open(group: FakeGroup, clock: ManualClock) -> None:
    group.put(HALF_TOPIC, 0, b"a", b"b")
    clock.now_s = 2
    group.put(HALF_TOPIC, 0, b"c")
    a, b, c = positions(group, 3)
    assert group.state.transactions.open == {
        0: OpenHalf(a, EPOCH_MS),
        1: OpenHalf(b, EPOCH_MS),
        2: OpenHalf(c, EPOCH_MS + 2000),
    }
    assert group.state.transactions.oldest_position == a


def test_a_decision_closes_it_and_is_remembered(group: FakeGroup) -> None:
    group.put(HALF_TOPIC, 0, b"a", b"b", b"c")
    _, b, _ = positions(group, 3)
    group.store(TransactionsChange(decided=((2, ROLLBACK), (0, COMMIT))))
    assert list(group.state.transactions.open) == [1]
    assert group.state.transactions.decided == {2: ROLLBACK, 0: COMMIT}
    assert group.state.transactions.oldest_position == b


def test_check_is_counted_with_the_time_of_its_entry(group: FakeGroup, clock: ManualClock) -> None:
    group.put(HALF_TOPIC, 0, b"a")
    clock.now_s = 6
    group.store(TransactionsChange(checked=((0, 1),)))
    clock.now_s = 36
    group.store(TransactionsChange(checked=((0, 2),)))
    (half,) = group.state.transactions.open.values()
    assert half[1:] == (EPOCH_MS, 2, EPOCH_MS + 36_000)


@pytest.mark.parametrize(
    "wrong",
    [
        TransactionsChange(decided=((1, COMMIT),)),
        TransactionsChange(checked=((0, 2),)),
        TransactionsChange(checked=((1, 1),)),
    ],
)
def test_what_contradicts_the_tables_stops_the_node(
    group: FakeGroup, wrong: TransactionsChange
) -> None:
    group.put(HALF_TOPIC, 0, b"a")
    with pytest.raises(InvariantBroken, match="half message"):
        group.store(wrong)


def test_a_second_decision_names_the_first(group: FakeGroup) -> None:
    group.put(HALF_TOPIC, 0, b"a")
    group.store(TransactionsChange(decided=((0, ROLLBACK),)))
    with pytest.raises(InvariantBroken, match="decided as ROLLBACK"):
        group.store(TransactionsChange(decided=((0, COMMIT),)))


def test_only_the_newest_decisions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "DECISIONS_KEPT", 2)
    table = TransactionTable()
    for half_offset in range(4):
        table.begin(half_offset, 100 * half_offset, 0)
    for half_offset in (3, 0, 2):
        table.decide(half_offset, COMMIT)
    assert list(table.decided) == [0, 2]
