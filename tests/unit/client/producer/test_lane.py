"""The line of sends, what leaves in one request, sequences, and what follows a failure."""

import itertools
import struct
from typing import cast

import pytest
import trio
import trio.testing

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    RequesterAwayError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.retry import Failure, FailureKind
from dledger.client.core.route import MessageQueue
from dledger.client.producer.lane import (
    OVERHEAD_BYTES,
    PIPELINE_BYTES,
    SOLOS_MIN,
    Coalescer,
    Lane,
    settle_batch,
)
from dledger.client.producer.results import LiveSends, SendHooks
from dledger.client.producer.sequences import ProducerSession, Sequences
from dledger.client.producer.state import Next, SendSlot, SlotState, Standing, error_of, next_of
from dledger.remoting.errors import RemoteProtocolError
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.own_fields import OPEN_SEQUENCES_MAX, ProducerStamp
from tests.harness.beside import beside
from tests.harness.present import present

ID = b"0123456789abcdef"


async def test_stamp_has_the_lowest_sequence_still_open() -> None:
    session = ProducerSession(ID, 7)
    first, second = session.begin(), session.begin()
    assert session.stamp(second) == ProducerStamp(ID, 7, 1, 0)
    session.settle(first)
    assert session.stamp(second) == ProducerStamp(ID, 7, 1, 1)
    session.settle(second)
    assert session.first_open == 2


async def test_nothing_new_leaves_while_one_is_repeated() -> None:
    session = ProducerSession(ID, 7)
    first = session.begin()
    session.hold(first)
    left: list[int] = []

    async def send() -> None:
        await session.wait_while_full()
        left.append(session.begin())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert left == []
        session.settle(first)
    assert left == [1]


async def test_of_two_repetitions_the_earlier_goes_first() -> None:
    session = ProducerSession(ID, 7)
    sequences = [session.begin(), session.begin(), session.begin()]
    went: list[int] = []

    async def repeat(sequence: int) -> None:
        session.hold(sequence)
        await session.turn(sequence)
        went.append(sequence)
        await trio.testing.wait_all_tasks_blocked()
        session.settle(sequence)

    async with trio.open_nursery() as nursery:
        for sequence in (2, 0, 1):
            nursery.start_soon(repeat, sequences[sequence])
    assert went == [0, 1, 2]


async def test_session_bounds_the_open_sequences() -> None:
    session = ProducerSession(ID, 7)
    for _ in range(OPEN_SEQUENCES_MAX):
        await session.wait_while_full()
        session.begin()
    with trio.move_on_after(0) as waited:
        await session.wait_while_full()
    assert waited.cancelled_caught
    session.settle(5)  # not the lowest
    with trio.move_on_after(0) as waited:
        await session.wait_while_full()
    assert waited.cancelled_caught
    session.settle(0)
    await session.wait_while_full()
    assert session.begin() == OPEN_SEQUENCES_MAX


MESSAGE = Message("T", b"x")


def _slot(queue_id: int = 0, size: int = 100, count: int = 1, topic: str = "T") -> SendSlot:
    records = b"r" * (size * count)
    sizes = struct.pack(f">{count}I", *[size] * count)
    return SendSlot(
        MESSAGE, MessageQueue(topic, "g", queue_id), "id", records, sizes, count, 10.0, False
    )


def test_records_stand_grouped_by_queue_in_the_order_offered() -> None:
    coalescer = Coalescer()
    slots = [_slot(0, 100), _slot(1, 200), _slot(0, 300), _slot(0, 50, count=2, topic="U")]
    for slot in slots:
        coalescer.offer(slot)
    batch = present(coalescer.take())
    assert batch.run_list() == [["T", 0, 2], ["T", 1, 1], ["U", 0, 2]]
    assert batch.slots() == [slots[0], slots[2], slots[1], slots[3]]
    assert batch.body()[:20] == struct.pack(">5I", 100, 300, 200, 50, 50)
    assert len(batch.body()) == 20 + 700
    assert coalescer.take() is None
    assert coalescer.waiting_bytes == 0


def test_a_request_is_limited_by_bytes_and_by_records() -> None:
    by_bytes = Coalescer(max_request_bytes=250)
    by_records = Coalescer(max_request_records=3)
    for coalescer in (by_bytes, by_records):
        for _ in range(5):
            coalescer.offer(_slot(0, 100))
    assert [_taken(by_bytes) for _ in range(4)] == [2, 2, 1, 0]
    assert [_taken(by_records) for _ in range(3)] == [3, 2, 0]


def test_no_request_has_more_bytes_than_are_set() -> None:
    coalescer = Coalescer(max_request_bytes=250)
    for _ in range(5):
        coalescer.offer(_slot(0, 100))
    batch = present(coalescer.take(1_000))
    assert sum(slot.count for slot in batch.slots()) == 2


def _taken(coalescer: Coalescer) -> int:
    batch = coalescer.take()
    return 0 if batch is None else sum(slot.count for slot in batch.slots())


def test_lane_counts_waiting_bytes_with_overhead() -> None:
    coalescer = Coalescer(max_waiting_bytes=1000)
    coalescer.offer(_slot(0, 300))
    assert coalescer.has_space
    coalescer.offer(_slot(0, 300))
    assert not coalescer.has_space
    assert coalescer.waiting_bytes == 2 * (300 + OVERHEAD_BYTES)
    coalescer.take()
    assert coalescer.has_space


def test_requeued_sends_go_first_and_in_order() -> None:
    coalescer = Coalescer()
    old = [_slot(), _slot()]
    for slot in old:
        coalescer.offer(slot)
    coalescer.take()
    new = _slot()
    coalescer.offer(new)
    coalescer.requeue(old)
    batch = present(coalescer.take())
    assert batch.slots() == [*old, new]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_requests_given_back_in_any_order_keep_the_line(order: tuple[int, ...]) -> None:
    coalescer = Coalescer()
    every = [_slot() for _ in range(7)]
    requests = [every[0:2], every[2:3], every[3:5]]
    for slot in every[:5]:
        coalescer.offer(slot)
    coalescer.take()
    coalescer.offer(every[5])
    for number in order:
        coalescer.requeue(requests[number])
    coalescer.requeue([])
    coalescer.offer(every[6])
    batch = present(coalescer.take())
    assert batch.slots() == every
    assert coalescer.waiting_bytes == 0


@pytest.mark.parametrize("grown", [0, 24])
def test_offsets_and_positions_add_up_over_accepted_runs_only(grown: int) -> None:
    coalescer = Coalescer()
    first, refused, pair, last = _slot(0, 100), _slot(1, 200), _slot(2, 30, count=2), _slot(2, 40)
    for slot in (first, refused, pair, last):
        coalescer.offer(slot)
    batch = present(coalescer.take())
    stored, refusals = settle_batch(
        batch,
        {
            "results": [[0, 7], [16, -1, "no"], [0, 70]],
            "phy_offset": 1000,
            "store_host": b"12345678",
            "grown_bytes": grown,
        },
    )
    assert stored == [first, pair, last]
    assert [s.base_offset for s in stored] == [7, 70, 72]
    assert [s.phy_offset for s in stored] == [1000, 1100 + grown, 1160 + 3 * grown]
    assert [(r.slots, r.code, r.remark) for r in refusals] == [([refused], 16, "no")]
    assert not refused.settled
    assert first.store_host == b"12345678"


@pytest.mark.parametrize(
    "ext",
    [
        {},
        {"results": [[0, 1], [0, 2]]},
        {"results": [[0]]},
        {"results": "x"},
        {"results": [[0, 1]], "phy_offset": "no"},
    ],
)
def test_answer_that_does_not_fit_settles_no_send(ext: dict[str, object]) -> None:
    coalescer = Coalescer()
    slot = _slot()
    coalescer.offer(slot)
    batch = present(coalescer.take())
    with pytest.raises(RemoteProtocolError):
        settle_batch(batch, ext)
    assert not slot.settled


# ---------------------------------------------------------------------------------- leaving


def lane_of(open_max: int = 4) -> Lane:
    return Lane("g", Coalescer(), Sequences(lambda: b"p"), open_max)


def leave(lane: Lane) -> int:
    """Take a request, end it, and return how many sends were in it."""
    batch = present(lane.take())
    lane.open += 1
    lane.request_ended(batch.slot_count)
    return batch.slot_count


def test_lane_sends_at_once_after_requests_of_one_send() -> None:
    lane = lane_of()
    for _ in range(SOLOS_MIN):
        assert not lane.offer(_slot())
        assert leave(lane) == 1
    assert lane.offer(_slot())
    assert leave(lane) == 1
    assert lane.offer(_slot())


def test_lane_waits_for_company_after_a_request_of_many() -> None:
    lane = lane_of()
    for _ in range(SOLOS_MIN):
        lane.offer(_slot())
        leave(lane)
    lane.offer(_slot())
    lane.offer(_slot())
    assert leave(lane) == 2
    assert not lane.offer(_slot())


def test_lane_keeps_later_sends_while_a_request_is_open() -> None:
    lane = lane_of()
    for _ in range(SOLOS_MIN):
        lane.offer(_slot())
        leave(lane)
    assert lane.offer(_slot())
    assert lane.take() is not None
    lane.open += 1
    assert not lane.offer(_slot())
    assert not lane.may_leave
    lane.request_ended(1)
    assert lane.may_leave


def test_lane_opens_more_requests_only_while_much_waits() -> None:
    lane = lane_of(open_max=2)
    lane.open = 1
    lane.offer(_slot(size=PIPELINE_BYTES - 2 * OVERHEAD_BYTES))
    assert not lane.may_leave
    lane.offer(_slot(size=OVERHEAD_BYTES))
    assert lane.may_leave
    lane.open = 2
    assert not lane.may_leave


# ---------------------------------------------------------------------------------- deadlines


async def test_send_of_a_hook_ends_at_its_deadline_too() -> None:
    first, second = _slot(), _slot()

    class Hook:
        def after(self, slot: SendSlot) -> None:
            if slot is first:
                sends.add(second)

    sends = LiveSends(TrioClock(), cast(SendHooks, Hook()))
    first.deadline, second.deadline = trio.current_time() + 1, trio.current_time() + 2
    sends.add(first)
    async with beside(sends.run):
        await trio.sleep(1.5)
        assert (first.state, second.state) == (SlotState.FAILED, SlotState.WAITING)
        await trio.sleep(1.0)
        assert second.state is SlotState.FAILED


FORGOTTEN = Failure(FailureKind.UNKNOWN, 1, is_forgotten=True)


@pytest.mark.parametrize("kind", FailureKind)
def test_next_releases_what_has_no_sequence(kind: FailureKind) -> None:
    for failure in (Failure(kind), Failure(kind, is_forgotten=True)):
        assert next_of(Standing.UNNUMBERED, failure, is_alone=False) is Next.RELEASE


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("is_alone", [False, True])
def test_next_repeats_what_may_be_stored(kind: FailureKind, is_alone: bool) -> None:
    assert next_of(Standing.UNCERTAIN, Failure(kind), is_alone=is_alone) is Next.REPEAT


@pytest.mark.parametrize("is_alone", [False, True])
def test_next_of_a_forgotten_request(is_alone: bool) -> None:
    assert next_of(Standing.NUMBERED, FORGOTTEN, is_alone=is_alone) is Next.RENEW
    assert next_of(Standing.UNCERTAIN, FORGOTTEN, is_alone=is_alone) is Next.END


@pytest.mark.parametrize(
    ("failure", "error", "outcome"),
    [
        (Failure(FailureKind.UNKNOWN, 1), UnknownOutcomeError, "unknown"),
        (Failure(FailureKind.UNREACHABLE), BrokerUnreachableError, "not_stored"),
        (Failure(FailureKind.NOT_LEADER), BrokerUnreachableError, "not_stored"),
        (Failure(FailureKind.FINAL), MessageIllegalError, "not_stored"),
        (Failure(FailureKind.FINAL, 13), MessageIllegalError, "not_stored"),
        (Failure(FailureKind.FINAL, 16), BrokerRefusedError, "not_stored"),
        (Failure(FailureKind.BUSY, 2), BrokerBusyError, "not_stored"),
        (Failure(FailureKind.REDIRECTED, 14), BrokerBusyError, "not_stored"),
        (Failure(FailureKind.REQUESTER_AWAY, 1), RequesterAwayError, "not_stored"),
    ],
)
def test_error_of_a_failure_by_kind_and_code(
    failure: Failure, error: type[ClientError], outcome: str
) -> None:
    slot = SendSlot(Message("T", b"x"), MessageQueue("T", "g", 0), "id", b"", b"", 1, 1.0, False)
    found = error_of(slot, failure, "g")
    assert type(found) is error
    assert found.outcome == outcome
    slot.sent = True
    assert error_of(slot, failure, "g").outcome == "unknown"
