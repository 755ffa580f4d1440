"""The client's pure parts under arbitrary input."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dledger.client.core.message import Message
from dledger.client.core.retry import FailureKind, RetryPolicy, RetrySchedule
from dledger.client.core.route import MessageQueue
from dledger.client.producer.lane import Coalescer, moved_records, settle_batch
from dledger.client.producer.queue_selection import LatencyFaultTable, QueueSelector
from dledger.client.producer.state import SendSlot, SlotState
from dledger.commitlog.record import decode_record, encode_record

policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 5),
    retry_unknown=st.booleans(),
    first_backoff_s=st.floats(0.001, 1),
    max_backoff_s=st.floats(0.001, 2),
    max_redirects=st.integers(0, 5),
)


@given(
    policies,
    st.floats(0, 20),
    st.lists(st.tuples(st.sampled_from(FailureKind), st.floats(0, 3), st.booleans()), max_size=60),
)
def test_no_attempt_starts_after_the_deadline(
    policy: RetryPolicy, budget_s: float, failures: list[tuple[FailureKind, float, bool]]
) -> None:
    schedule = RetrySchedule(policy, deadline=100.0 + budget_s)
    now = 100.0
    unknown = 0
    immediate = 0
    for kind, took_s, other in failures:
        now += took_s
        step = schedule.next(kind, now, other_broker=other)
        if step is None:
            break
        assert step.delay_s >= 0
        assert now + step.delay_s < 100.0 + budget_s
        assert step.delay_s <= max(policy.max_backoff_s, policy.first_backoff_s)
        unknown += kind is FailureKind.UNKNOWN
        assert unknown <= policy.max_retries
        assert kind is not FailureKind.FINAL
        immediate = immediate + 1 if step.delay_s == 0 else 0
        assert immediate <= policy.max_redirects + policy.max_retries + 1 or other
        now += step.delay_s


@given(st.integers(1, 20), st.integers(0, 1000), st.integers(1, 10))
def test_round_robin_is_fair(queues: int, start: int, rounds: int) -> None:
    selector = QueueSelector(start)
    among = [MessageQueue("T", "g", i) for i in range(queues)]
    chosen = Counter(selector.select(among).queue_id for _ in range(queues * rounds))
    assert set(chosen.values()) == {rounds}
    assert len(chosen) == queues


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 20000), st.booleans()), max_size=8),
    st.sampled_from([None, "a", "b"]),
    st.floats(0, 60),
)
def test_a_queue_to_avoid_is_only_taken_when_there_is_no_better(
    brokers: list[str], notes: list[tuple[str, float, bool]], last: str | None, now: float
) -> None:
    queues = [MessageQueue("T", name, i) for i, name in enumerate(brokers)]
    faults = LatencyFaultTable()
    for name, latency_ms, failed in notes:
        faults.note(name, latency_ms, 0.0, isolate=failed)
    chosen = QueueSelector().select_avoiding(queues, last_broker=last, faults=faults, now=now)
    good = [n for n in brokers if n != last and faults.available(n, now)]
    if good:
        assert chosen.broker_name in good
    elif set(brokers) != {last}:
        assert chosen.broker_name != last


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(100, 300), st.booleans(), st.booleans()),
        max_size=40,
    ),
    st.integers(100, 2000),
    st.integers(1, 10),
    st.sets(st.integers(0, 3)),
)
def test_every_send_is_in_one_request_and_gets_its_own_offsets(
    sends: list[tuple[int, int, bool, bool]],
    max_bytes: int,
    max_records: int,
    refused_queues: set[int],
) -> None:
    """Offsets handed out equal those of a model that stores record by record."""
    coalescer = Coalescer(max_request_bytes=max_bytes, max_request_records=max_records)
    slots = []
    for queue_id, size, abandon_waiting, _ in sends:
        slot = SendSlot(
            Message("T", b"x"),
            MessageQueue("T", "g", queue_id),
            "id",
            bytes(size),
            size.to_bytes(4, "big"),
            1,
            1.0,
            False,
        )
        coalescer.offer(slot)
        slots.append(slot)
        if abandon_waiting:
            slot.state = SlotState.ABANDONED
    late = {id(slot) for slot, send in zip(slots, sends, strict=True) if send[3]}
    log_position = 5000
    lengths: Counter[int] = Counter()
    expected: dict[int, tuple[int, int]] = {}
    seen: list[SendSlot] = []
    while (batch := coalescer.take()) is not None:
        sizes = [len(slot.records) for slot in batch.slots()]
        assert len(sizes) <= max_records
        assert sum(sizes) <= max_bytes or len(sizes) == 1
        seen.extend(batch.slots())
        results = []
        first = log_position
        for queue, run in batch.runs:
            if queue.queue_id in refused_queues:
                results.append([16, -1, "no"])
                continue
            results.append([0, lengths[queue.queue_id]])
            for slot in run:
                expected[id(slot)] = (lengths[queue.queue_id], log_position)
                lengths[queue.queue_id] += 1
                log_position += len(slot.records)
        for slot in batch.slots():
            if id(slot) in late:
                slot.state = SlotState.ABANDONED
        settle_batch(batch, {"results": results, "phy_offset": first, "store_host": bytes(8)})
    assert coalescer.waiting_bytes == 0
    assert len({id(s) for s in seen}) == len(seen)
    for slot, (queue_id, _, abandoned, given_up) in zip(slots, sends, strict=True):
        if abandoned:
            assert slot not in seen
        elif given_up:
            assert slot.state is SlotState.ABANDONED
        elif queue_id in refused_queues:
            assert slot.state is SlotState.WAITING
        else:
            assert slot.state is SlotState.STORED
            assert (slot.base_offset, slot.phy_offset) == expected[id(slot)]


@given(
    st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.integers(0, 2**31 - 1)
)
def test_moving_records_changes_nothing_but_the_queue(bodies: list[bytes], queue_id: int) -> None:
    records = [encode_record(topic="T", queue_id=1, body=body, properties=b"") for body in bodies]
    sizes = b"".join(len(r).to_bytes(4, "big") for r in records)
    moved = moved_records(b"".join(records), sizes, queue_id)
    expected = b"".join(
        encode_record(topic="T", queue_id=queue_id, body=body, properties=b"") for body in bodies
    )
    assert moved == expected
    assert decode_record(moved).queue_id == queue_id
