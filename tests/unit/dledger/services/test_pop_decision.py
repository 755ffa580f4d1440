"""Decisions of one entry over many messages whose time is over: order, and how many are read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from dledger.commitlog.entry import Run
from dledger.services.pop_decision import (
    MAX_EXPIRED_LOOKED_AT,
    DeadLetter,
    Found,
    PopDecision,
    Receive,
    SpentKey,
)
from dledger.state.pop import PopChange, PopGrant, PopKey, PopRow, PopRows, apply_pop

KEY: PopKey = ("g", "T", 0)
TOKEN = 1


@dataclass
class Reader:
    """Implements `PopReader`: nothing new in the queue; counts what is read."""

    removed: frozenset[int] = frozenset()
    copies: bool = True
    is_busy: bool = False
    sizes: list[int] = field(default_factory=list)
    letters: list[int] = field(default_factory=list)

    def find(
        self, receive: Receive, queue_id: int, offset: int, wanted: int, max_bytes: int
    ) -> Found:
        return Found((), 0, offset)

    def size_of(self, topic: str, queue_id: int, offset: int) -> int | None:
        self.sizes.append(offset)
        return None if offset in self.removed else 100

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return (0, 1 << 40)

    def start(self, key: PopKey) -> int | None:
        return 0

    def committed(self, key: PopKey) -> int | None:
        return 0

    def is_young(self, topic: str, queue_id: int) -> bool:
        return True

    def may_pop(self, key: PopKey) -> bool:
        return not self.is_busy

    def dead_letter(self, key: PopKey, offset: int, attempts: int) -> DeadLetter | None:
        self.letters.append(offset)
        return DeadLetter(b"copy", Run("%DLQ%g", 0, 1), None) if self.copies else None


def rows_of(count: int) -> PopRows:
    """Return the table with messages 0 … count - 1 out; the time of all is over at 1000."""
    rows: PopRows = {}
    grant = PopGrant(KEY, 1000, 0, count, tuple(range(count)), (), 0)
    apply_pop(rows, PopChange(grants=(grant,)), TOKEN, 0, lambda _: 0)
    return rows


def spend(rows: PopRows, count: int) -> None:
    """Let the lowest messages have been out twice."""
    grant = PopGrant(KEY, 0, rows[KEY].next_offset, rows[KEY].next_offset, (), pairs(count))
    apply_pop(rows, PopChange(grants=(grant,)), TOKEN, 1000, lambda _: 0)
    for offset in range(count):
        assert rows[KEY].out[offset].attempts == 2
    for offset in range(count, len(rows[KEY].out)):
        rows[KEY].put(offset, rows[KEY].out[offset]._replace(expires_ms=1001))


def pairs(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((offset, TOKEN) for offset in range(count))


def asked(wanted: int = 32, max_bytes: int = 1 << 20, *, is_fifo: bool = False) -> Receive:
    return Receive(
        group="g",
        topic="T",
        queue_ids=(0,),
        wanted=wanted,
        max_bytes=max_bytes,
        invisible_ms=1000,
        retries=1,
        is_fifo=is_fifo,
    )


def offsets(decision: PopDecision, receive: Receive) -> list[int]:
    return [at for grant in decision.receive(receive) for at, _ in grant.again]


@pytest.mark.parametrize(("max_bytes", "expected"), [(50, [0]), (199, [0]), (200, [0, 1])])
@pytest.mark.parametrize("is_fifo", [False, True])
def test_message_larger_than_the_limit_comes_again_alone(
    max_bytes: int, expected: list[int], *, is_fifo: bool
) -> None:
    rows = rows_of(3)
    decision = PopDecision(rows, Reader(), 1000, 3)
    assert offsets(decision, asked(max_bytes=max_bytes, is_fifo=is_fifo)) == expected


def test_requests_of_an_entry_read_each_offset_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, yielded = rows_of(10_000), list[int]()
    expired = PopRow.expired

    def counted(self: PopRow, now_ms: int) -> Iterator[int]:
        for offset in expired(self, now_ms):
            yielded.append(offset)
            yield offset

    monkeypatch.setattr(PopRow, "expired", counted)
    reader = Reader()
    decision = PopDecision(rows, reader, 1000, len(rows[KEY].out))
    got: list[int] = []
    while not decision.is_full:
        got += offsets(decision, asked())
        assert decision.has_messages(asked(1))
    assert got == list(range(4096))
    assert yielded == list(range(4097)), "each offset is looked at by one request"


def test_message_too_large_for_one_is_for_the_next() -> None:
    decision = PopDecision(rows_of(5), Reader(), 1000, 5)
    assert [offsets(decision, asked(max_bytes=250)) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_due_behind_many_spent_is_handed_out() -> None:
    rows = rows_of(10_000)
    spend(rows, 9_990)
    reader, aside = Reader(copies=False), set[SpentKey]()
    decision = PopDecision(rows, reader, 1001, 10_000, aside)
    assert offsets(decision, asked()) == list(range(9_990, 10_000))
    assert reader.letters == list(range(MAX_EXPIRED_LOOKED_AT))
    assert decision.passed_over == {("g", "T")}, "the others are tried in a moment"
    assert decision.dead == []


def test_spent_without_a_copy_let_others_be_tried() -> None:
    rows = rows_of(1_000)
    spend(rows, 1_000)
    reader, aside = Reader(copies=False), set[SpentKey]()
    for _ in range(5):
        assert offsets(PopDecision(rows, reader, 1001, 1_000, aside), asked()) == []
    assert reader.letters == list(range(1_000)), "each is tried once, none again at once"
    reader.copies = True
    aside.clear()
    decision = PopDecision(rows, reader, 1001, 1_000, aside)
    assert offsets(decision, asked()) == []
    assert [mark.offset for mark in decision.dead] == list(range(MAX_EXPIRED_LOOKED_AT))


def test_due_behind_many_removed_is_two_entries_later() -> None:
    rows = rows_of(600)
    reader = Reader(removed=frozenset(range(599)))
    got: list[list[int]] = []
    for index in range(2, 5):
        decision = PopDecision(rows, reader, 1000, 600)
        got.append(offsets(decision, asked()))
        assert decision.change is not None
        apply_pop(rows, decision.change, index, 1000, lambda _: 0)
    assert got == [[], [], [599]]


def test_spent_without_a_copy_stops_a_queue_in_order() -> None:
    rows = rows_of(3)
    spend(rows, 1)
    reader, aside = Reader(copies=False), set[SpentKey]()
    decision = PopDecision(rows, reader, 1001, 3, aside)
    assert offsets(decision, asked(is_fifo=True)) == []
    assert decision.change is None
    assert offsets(decision, asked()) == [1, 2], "a request without order goes on"
    reader.copies = True
    decision = PopDecision(rows, reader, 1001, 3, aside)
    assert offsets(decision, asked(is_fifo=True)) == [1, 2]
    assert [mark.offset for mark in decision.dead] == [0]


def test_notice_of_a_queue_that_pulls_have_is_tried_again() -> None:
    decision = PopDecision(rows_of(1), Reader(is_busy=True), 1000, 1)
    assert not decision.has_messages(asked(1))
    assert decision.passed_over == {("g", "T")}
