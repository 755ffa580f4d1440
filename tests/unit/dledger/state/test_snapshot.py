"""A snapshot is the tables; anything else is refused."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from commitlog.errors import CorruptStoreError
from dledger.state.configs import SubscriptionGroupConfig, TopicConfig
from dledger.state.names import builtin_groups, builtin_topics
from dledger.state.snapshot import framed, load, snapshot
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    SubscriptionGroupsChange,
    TopicsChange,
    state_batch,
)
from tests.harness.fake_group import BROKER, CLUSTER, FakeGroup

BUILTIN: dict[str, Any] = {
    "builtin_topics": builtin_topics(CLUSTER, BROKER),
    "builtin_groups": builtin_groups(),
}


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


def test_loading_gives_the_same_tables(filled: FakeGroup) -> None:
    data = snapshot(filled.state)
    assert load(data, **BUILTIN) == filled.state
    assert snapshot(load(data, **BUILTIN)) == data


def test_any_damaged_byte_is_noticed(filled: FakeGroup) -> None:
    data = snapshot(filled.state)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptStoreError, match="snapshot"):
            load(damaged, **BUILTIN)


@pytest.mark.parametrize("kept", [0, 5, 23, 40])
def test_a_cut_snapshot_is_refused(filled: FakeGroup, kept: int) -> None:
    with pytest.raises(CorruptStoreError, match="snapshot"):
        load(snapshot(filled.state)[:kept], **BUILTIN)


@pytest.mark.parametrize("position", ["x", -1, 1.5, None])
def test_a_queue_that_begins_at_no_position_is_refused(filled: FakeGroup, position: Any) -> None:
    body = cbor2.loads(snapshot(filled.state, hints=True)[24:])
    body["queue_positions"]["T"][1] = position
    with pytest.raises(CorruptStoreError, match="begins at"):
        load(framed(cbor2.dumps(body)), **BUILTIN)
