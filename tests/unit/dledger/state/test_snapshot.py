"""A snapshot is the tables; anything else is refused."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import CorruptStoreError
from dledger.state.apply import raise_min_offsets
from dledger.state.pop import PopChange, PopGrant, PopMark, PopRowCopy
from dledger.state.snapshot import Image, cut_everything, framed, load, snapshot, take_cut
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    SubscriptionGroupsChange,
    TopicsChange,
    state_batch,
)
from dledger.state.table import StateChange
from dledger.state.tables import QueueBounds
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig
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
            ConsumerOffsetsChange.of((("g", "T", 1, 9),)),
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


def change(group: FakeGroup, *changes: StateChange) -> None:
    group.store(*changes)


def create(group: FakeGroup, count: int) -> None:
    names = [f"made-{number:05d}" for number in range(count)]
    change(group, TopicsChange(put=tuple(TopicConfig(name, 4, 4) for name in names)))
    offsets = tuple(("g", name, queue_id, 7) for name in names for queue_id in range(4))
    change(group, ConsumerOffsetsChange.of(offsets))
    for name in names[:50]:
        group.put(name, 0, b"x")
    group.settle()


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
    image = Image()
    image.take(cut_everything(tables))

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
    image.take(take_cut(tables))
    assert load(image.snapshot()) == tables


def test_what_a_cut_copies_does_not_grow_with_the_tables(group: FakeGroup) -> None:
    copied = []
    for count in (10, 1_000):
        create(group, count)
        cut_everything(group.state)
        change(group, TopicsChange(put=(TopicConfig(f"new-{count}", 2, 2),)))
        change(group, ConsumerOffsetsChange.of((("g", "made-00003", 1, 8),)))
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
    assert copied[0] == {"topics": 1, "topic_begins": 1, "consumer_offsets": 1, "queues": 3}
