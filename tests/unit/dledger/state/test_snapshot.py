"""A snapshot is the tables; anything else is refused.

The encoded tables follow by cuts, and are what encoding everything gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import CorruptStoreError
from dledger.state.accounts import AccessChange, AccountConfig
from dledger.state.apply import raise_min_offsets
from dledger.state.pop import (
    HAS_ROW,
    PopChange,
    PopGrant,
    PopMark,
    PopRowCopy,
    RequestMode,
)
from dledger.state.queue_lock import LockGrant, LockRelease, QueueLocksChange
from dledger.state.snapshot import Image, cut_everything, framed, load, snapshot, take_cut
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    ProducerOpenedChange,
    ProducerSendChange,
    QueueFloorsChange,
    StateChange,
    SubscriptionGroupsChange,
    TopicsChange,
    TransactionsChange,
    state_batch,
)
from dledger.state.tables import QueueBounds
from dledger.state.topics import (
    HALF_TOPIC,
    SubscriptionGroupConfig,
    TopicConfig,
)
from dledger.state.transactions import TransactionDecision
from tests.harness.fake_group import FakeGroup


def whole(group: FakeGroup) -> bytes:
    """Return a snapshot made at once of all there is."""
    image = Image()
    image.take(cut_everything(group.state))
    return image.snapshot()


@pytest.fixture
def filled(group: FakeGroup) -> FakeGroup:
    group.propose(
        state_batch(
            TopicsChange(put=(TopicConfig("T", 2, 2, attributes={"a": "b"}),)),
            SubscriptionGroupsChange(put=(SubscriptionGroupConfig("g"),)),
            ConsumerOffsetsChange((("g", "T", 1, 9),)),
            DelayProgressChange(4, 0, 2),
        ),
        lambda _: None,
    )
    group.put("T", 1, b"x", b"y")
    return group


def test_any_damaged_byte_is_noticed(filled: FakeGroup) -> None:
    data = snapshot(filled.state)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptStoreError, match="snapshot"):
            load(damaged)


@pytest.mark.parametrize("kept", [0, 5, 23, 40])
def test_a_cut_snapshot_is_refused(filled: FakeGroup, kept: int) -> None:
    with pytest.raises(CorruptStoreError, match="snapshot"):
        load(snapshot(filled.state)[:kept])


@pytest.mark.parametrize("position", ["x", -1, 1.5, None])
def test_a_queue_that_begins_at_no_position_is_refused(filled: FakeGroup, position: Any) -> None:
    body = cbor2.loads(whole(filled)[24:])
    body["first_positions"] = [[["T", 1], position]]
    with pytest.raises(CorruptStoreError, match="another shape"):
        load(framed(cbor2.dumps(body)))


DECISIONS = list(TransactionDecision)


def change(group: FakeGroup, *changes: StateChange) -> None:
    group.propose(state_batch(*changes), lambda _: None)
    group.settle()


def create(group: FakeGroup, count: int) -> None:
    names = [f"made-{number:05d}" for number in range(count)]
    change(group, TopicsChange(put=tuple(TopicConfig(name, 4, 4) for name in names)))
    offsets = tuple(("g", name, queue_id, 7) for name in names for queue_id in range(4))
    change(group, ConsumerOffsetsChange(offsets))
    for name in names[:50]:
        group.put(name, 0, b"x")
    group.settle()


def steps(group: FakeGroup, rng: random.Random) -> Iterator[None]:
    """Change every table, by one entry at a time."""
    topics, names = [f"T{n}" for n in range(30)], ["a", "bb", "ccc"]
    producers = {bytes([n]) * 16: 0 for n in range(4)}
    epochs: dict[bytes, int] = {}
    halves = 0
    state = group.state
    while True:
        topic, name = rng.choice(topics), rng.choice(names)
        match rng.randrange(12):
            case 0:
                change(group, TopicsChange(put=(TopicConfig(topic, rng.randrange(1, 40)),)))
            case 1:
                change(group, TopicsChange(delete=(topic,)))
            case 2:
                config = SubscriptionGroupConfig(name, attributes={"k" * rng.randrange(40): "v"})
                forget = (name,) if rng.random() < 0.3 else ()
                change(group, SubscriptionGroupsChange((config,), forget=forget))
            case 3:
                change(group, ConsumerOffsetsChange(((name, topic, rng.randrange(9), 1 << 40),)))
            case 4:
                group.put(topic, rng.randrange(3), b"x", b"y")
                group.settle()
            case 5:
                group.put(HALF_TOPIC, 0, b"h")
                group.settle()
                halves += 1
            case 6 if state.transactions.open:
                half = rng.choice(list(state.transactions.open))
                checks = state.transactions.open[half].checks
                change(group, TransactionsChange(checked=((half, checks + 1),)))
                if rng.random() < 0.7:
                    change(group, TransactionsChange(decided=((half, rng.choice(DECISIONS)),)))
            case 7:
                key = (name, topic, rng.randrange(3))
                lock = state.queue_locks.get(key)
                if lock is None:
                    change(group, QueueLocksChange(grants=(LockGrant(key, "me"),)))
                else:
                    change(group, QueueLocksChange(releases=(LockRelease(key, lock.token),)))
            case 8:
                producer = rng.choice(list(producers))
                if producer not in epochs or rng.random() < 0.1:
                    change(group, ProducerOpenedChange(producer))
                    epochs[producer] = state.applied_index
                    producers[producer] = 0
                sequence = producers[producer]
                producers[producer] += 1
                sent = ProducerSendChange(producer, epochs[producer], sequence, sequence // 2, ())
                change(group, sent)
            case 9:
                key = (name, topic, rng.randrange(3))
                row = state.pops.get(key)
                committed = state.consumer_offset(*key)
                since = row.next_offset if row else committed or 0
                fresh = tuple(range(since, since + 3))
                grant = PopGrant(
                    key, 9, since, since + 3, fresh, committed=HAS_ROW if row else committed
                )
                out = list(row.out.items())[:2] if row else []
                acked = tuple(PopMark(key, offset, each.token) for offset, each in out)
                modes = (RequestMode(name, topic, "POP"),) if rng.random() < 0.2 else ()
                if rng.random() < 0.5:
                    change(group, PopChange(acked=acked, grants=(grant,), modes=modes))
                else:
                    change(group, PopChange(acked=acked, modes=modes))
            case 10:
                put = (AccountConfig(f"account-{name}", "s" * rng.randrange(7, 40)),)
                white = rng.choice([None, "", "10.0.0.*"])
                change(group, AccessChange(put, (f"account-{rng.choice(names)}",), white))
            case _:
                at = state.delay_progress.get(3, 0)
                change(group, DelayProgressChange(3, at, at + 1))
                ends = [key for key, bounds in state.queues.items() if key[0].startswith("T")]
                if ends:
                    queue = rng.choice(ends)
                    floor = (*queue, state.queues[queue].max_offset)
                    change(group, QueueFloorsChange((floor,)))
        yield


def test_a_cut_leaves_packing_to_the_worker(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty full rows would keep the event loop from heartbeats for a second."""
    key = ("g", "T", 0)
    fresh = tuple(range(50))
    change(group, PopChange(grants=(PopGrant(key, 9, 0, 50, fresh),)))
    with monkeypatch.context() as patch:
        patch.setattr(PopRowCopy, "to_state", None)
        cuts = [take_cut(group.state), cut_everything(group.state)]
    out = group.state.pops[key].out
    change(group, PopChange(acked=(PopMark(key, 7, out[7].token),)))
    for cut in cuts:
        image = Image()
        image.take(cut)
        loaded = load(image.snapshot())
        assert list(loaded.pops[key].out) == list(fresh)


@pytest.mark.parametrize("seed", range(4))
def test_image_by_cuts_equals_a_whole_snapshot(group: FakeGroup, seed: int) -> None:
    rng = random.Random(seed)
    image, late = Image(), Image()
    image.take(cut_everything(group.state))
    waiting = [cut_everything(group.state)]
    walk = steps(group, rng)
    for _ in range(120):
        next(walk)
        if rng.random() < 0.3:
            cut = take_cut(group.state)
            image.take(cut)
            waiting.append(cut)
            assert image.applied_index == group.state.applied_index
            if rng.random() < 0.3:
                assert image.snapshot() == whole(group)
    for cut in waiting:
        late.take(cut)
    assert late.snapshot() == image.snapshot(), "a cut shares nothing with the tables"
    image.take(take_cut(group.state))
    assert image.snapshot() == whole(group)
    other = Image()
    other.take(cut_everything(group.state))
    assert other.snapshot() == whole(group)


def test_floor_visits_only_queues_it_changes(group: FakeGroup) -> None:
    for number in range(40):
        group.put(f"T{number:02d}", 0, b"x", b"y")
        group.settle()
    tables = load(whole(group))
    units = {
        topic: group.queues.queue(topic, 0).read(0, 2)["phy_offset"].tolist()
        for topic in (f"T{number:02d}" for number in range(40))
    }
    looked: list[str] = []

    def first_kept(topic: str, queue_id: int, bounds: QueueBounds) -> tuple[int, int]:
        looked.append(topic)
        for offset in range(bounds.min_offset, bounds.max_offset):
            if units[topic][offset] >= tables.floor.position:
                return offset, units[topic][offset]
        return bounds.max_offset, 0

    tables.floor = tables.floor._replace(position=units["T02"][1])
    raise_min_offsets(tables, first_kept)
    assert looked == ["T00", "T01", "T02"]
    assert [tables.min_offset(f"T{number:02d}", 0) for number in range(4)] == [2, 2, 1, 0]

    looked.clear()
    tables.floor = tables.floor._replace(position=units["T04"][0])
    raise_min_offsets(tables, first_kept)
    assert looked == ["T02", "T03"]


def test_what_a_cut_copies_does_not_grow_with_the_tables(group: FakeGroup) -> None:
    copied = []
    for count in (10, 1_000):
        create(group, count)
        cut_everything(group.state)
        change(group, TopicsChange(put=(TopicConfig("new", 2, 2),)))
        change(group, ConsumerOffsetsChange((("g", "made-00003", 1, 8),)))
        group.put("made-00001", 1, b"y")
        group.settle()
        cut = take_cut(group.state)
        copied.append(
            {
                each.form.name: len(each.rows)
                for each in cut.tables
                if each.rows and not each.form.is_hint
            }
        )

    assert copied[0] == copied[1]
    assert copied[0] == {
        "topics": 1,
        "consumer_offsets": 1,
        "queues": 3,
    }
