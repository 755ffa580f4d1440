"""Schedules in the tables: put, fired and deleted; in snapshots that earlier versions refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import ForeignStoreError, InvariantBroken
from dledger.jepsen_like.simulation.reference_replica import digests_by_field
from dledger.state import snapshot as snapshots
from dledger.state.accounts import AccessChange
from dledger.state.image import Image, cut_everything, take_cut
from dledger.state.schedules import (
    Fired,
    Schedule,
    ScheduleConfig,
    SchedulesChange,
    apply_schedules,
)
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import TopicsChange, decode_change, encode_change, state_batch
from dledger.state.topics import SCHEDULES_QUEUE, TopicConfig, builtin_groups, builtin_topics
from tests.harness.fake_group import BROKER, CLUSTER, FakeGroup

CONFIG = ScheduleConfig("nightly", "T", b"go", "0 3 * * *", {"TAGS": "a"}, time_zone="Asia/Tokyo")

BUILTIN: dict[str, Any] = {
    "builtin_topics": builtin_topics(CLUSTER, BROKER),
    "builtin_groups": builtin_groups(),
}


def change(group: FakeGroup, *changes: SchedulesChange | TopicsChange | AccessChange) -> None:
    group.propose(state_batch(*changes), lambda _: None)
    group.settle()


def put(config: ScheduleConfig, at_ms: int) -> SchedulesChange:
    return SchedulesChange((config,), at_ms)


def rows_after(*changes: SchedulesChange) -> dict[str, Schedule]:
    rows: dict[str, Schedule] = {}
    for index, each in enumerate(changes, 1):
        apply_schedules(rows, each, index)
    return rows


def test_a_record_is_read_as_it_was_written() -> None:
    asked = SchedulesChange((CONFIG,), 77, ("gone",), (Fired("other", 5, 9, 2),), "op at host")
    queue_id, body = encode_change(asked)
    assert (queue_id, decode_change(queue_id, body)) == (SCHEDULES_QUEUE, asked)
    assert cbor2.loads(body) == {
        "v": 1,
        "put": [
            {
                "name": "nightly",
                "topic": "T",
                "body": b"go",
                "expression": "0 3 * * *",
                "properties": {"TAGS": "a"},
                "queue_id": -1,
                "time_zone": "Asia/Tokyo",
                "begin_ms": 0,
                "end_ms": 0,
                "paused": False,
            }
        ],
        "at": 77,
        "delete": ["gone"],
        "fired": [["other", 5, 9, 2]],
        "asked_by": "op at host",
    }
    fired = SchedulesChange(fired=(Fired("other", 5, 9),))
    assert cbor2.loads(encode_change(fired)[1]) == {"v": 1, "fired": [["other", 5, 9, 0]]}


def test_a_record_with_a_new_field_stops_the_node() -> None:
    body = cbor2.loads(encode_change(put(CONFIG, 1))[1])
    body["put"][0]["jitter"] = 5
    with pytest.raises(InvariantBroken, match="unreadable state record on queue 7"):
        decode_change(SCHEDULES_QUEUE, cbor2.dumps(body))


def test_a_fired_instant_moves_its_schedule_on() -> None:
    rows = rows_after(
        put(CONFIG, 100),
        SchedulesChange(fired=(Fired("nightly", 100, 500, 3),)),
        SchedulesChange(fired=(Fired("nightly", 500, 600),)),
    )
    assert rows == {"nightly": Schedule(CONFIG, 100, 600, 600, 2, 3)}


@pytest.mark.parametrize(
    "fired", [Fired("nightly", 99, 500), Fired("nightly", 100, 100), Fired("other", 100, 500)]
)
def test_an_instant_that_does_not_follow_stops_the_node(fired: Fired) -> None:
    with pytest.raises(InvariantBroken, match="fires schedule"):
        rows_after(put(CONFIG, 100), SchedulesChange(fired=(fired,)))


def test_another_message_leaves_instants_as_they_are() -> None:
    rows = rows_after(put(CONFIG, 100), put(replace(CONFIG, body=b"stop"), 900))
    assert rows["nightly"] == Schedule(replace(CONFIG, body=b"stop"), 100, 100)


def test_other_times_count_from_the_change() -> None:
    hourly = replace(CONFIG, expression="@every 1h")
    fired = SchedulesChange(fired=(Fired("nightly", 100, 500),))
    rows = rows_after(put(CONFIG, 100), fired, put(hourly, 900))
    assert rows["nightly"] == Schedule(hourly, 900, 900, 500, 1)


def test_what_was_due_in_a_pause_is_not_due_after_it() -> None:
    paused = replace(CONFIG, paused=True)
    rows = rows_after(put(CONFIG, 100), put(paused, 200), put(CONFIG, 900))
    assert rows["nightly"] == Schedule(CONFIG, 100, 900)


def test_a_clock_that_was_set_back_makes_nothing_due_again() -> None:
    fired = SchedulesChange(fired=(Fired("nightly", 100, 500),))
    rows = rows_after(put(CONFIG, 100), fired, put(replace(CONFIG, expression="@hourly"), 300))
    assert rows["nightly"].after_ms == 500


def test_a_topic_takes_its_schedules_along(group: FakeGroup) -> None:
    other = replace(CONFIG, name="other", topic="U")
    change(group, TopicsChange(put=(TopicConfig("T"), TopicConfig("U"))), put(CONFIG, 1))
    change(group, put(other, 1))
    change(group, TopicsChange(delete=("T",)))
    assert sorted(group.state.schedules) == ["other"]
    change(group, SchedulesChange(delete=("other", "never-there")))
    assert group.state.schedules == {}


def test_the_digest_sees_a_changed_instant(group: FakeGroup) -> None:
    change(group, put(CONFIG, 1))
    before = digests_by_field(group.state)
    row = group.state.schedules["nightly"]
    group.state.schedules["nightly"] = replace(row, after_ms=2)
    after = digests_by_field(group.state)
    assert {name for name in before if before[name] != after[name]} == {"schedules"}


def test_a_snapshot_carries_schedules_and_an_older_one_has_none(group: FakeGroup) -> None:
    change(group, TopicsChange(put=(TopicConfig("T"),)))
    older = snapshot(group.state)
    assert int.from_bytes(older[8:12], "big") == 1, "earlier versions read it"
    assert load(older, **BUILTIN).schedules == {}
    change(group, put(CONFIG, 5), SchedulesChange(fired=(Fired("nightly", 5, 9, 1),)))
    data = snapshot(group.state)
    loaded = load(data, **BUILTIN)
    assert loaded == group.state
    assert loaded.schedules == {"nightly": Schedule(CONFIG, 5, 9, 9, 1, 1)}
    assert (loaded.schedules_index, snapshot(loaded)) == (group.state.applied_index, data)


def test_an_earlier_version_refuses_a_snapshot_with_schedules(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when none is left: a name that comes again would be another schedule there."""
    change(group, AccessChange(white_addresses="10.0.0.*"))
    assert int.from_bytes(snapshot(group.state)[8:12], "big") == 2
    change(group, put(CONFIG, 5))
    change(group, SchedulesChange(delete=("nightly",)))
    data = snapshot(group.state)
    assert int.from_bytes(data[8:12], "big") == 4
    monkeypatch.setattr(snapshots, "SNAPSHOT_FORMAT", 3)
    with pytest.raises(ForeignStoreError, match="format 4; this version knows up to 3"):
        load(data, **BUILTIN)


def test_schedules_follow_by_cuts(group: FakeGroup) -> None:
    image = Image()
    image.take(cut_everything(group.state))
    change(group, TopicsChange(put=(TopicConfig("T"),)), put(CONFIG, 5))
    image.take(take_cut(group.state))
    assert image.snapshot() == snapshot(group.state, hints=True)
    change(group, SchedulesChange((replace(CONFIG, name="b"),), 7, (), (Fired("nightly", 5, 8),)))
    image.take(take_cut(group.state))
    assert image.snapshot() == snapshot(group.state, hints=True)
    change(group, TopicsChange(delete=("T",)))
    image.take(take_cut(group.state))
    assert image.snapshot() == snapshot(group.state, hints=True)
    whole = Image()
    whole.take(cut_everything(group.state))
    assert whole.snapshot() == image.snapshot()
