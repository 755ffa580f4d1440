"""No message ends a service: what cannot be processed is set aside, once, and the rest goes on."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.properties import MAX_PROPERTIES_BYTES, SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.remoting.protocol.topic_names import HALF_TOPIC, SET_ASIDE_TOPIC
from dledger.services.delayed_message import due_ms, timed_properties, with_real_destination
from dledger.services.leader_loop import DAMAGE_FINAL_S
from tests.harness.leader_services import DAY_S, LeaderServices
from tests.harness.rotten import flip_bit

BODY_AT = 88
"""Of a record with IPv4 hosts."""


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[LeaderServices]:
    leader = LeaderServices(tmp_path)
    yield leader
    leader.group.close()


def filled(properties: bytes, size: int = MAX_PROPERTIES_BYTES) -> bytes:
    """Return *properties* behind as many bytes of a client's as make *size*."""
    fill = size - len(properties) - len(b"F\x01\x02")
    return b"F\x01%b\x02%b" % (b"x" * fill, properties)


def timed(leader: LeaderServices, delay_s: float, given: bytes, *, fill: bool = False) -> bytes:
    """Return the properties a waiting message has in the timer topic."""
    due = due_ms(leader.clock.wall_ms() + int(delay_s * 1000))
    properties = timed_properties(given, "T", 0, due)
    return filled(properties) if fill else properties


ODD = [
    (b"TIMER_ROLL_TIMES\x01abc\x02", False),
    (b"TIMER_ROLL_TIMES\x01%b\x02" % (b"9" * 5000), False),
    (b"", True),
    (b"A\x01b\x01c\x02", False),
    (b"A\x01\xff\xfe\x02", False),
    (b"noseparator\x02\x02\x01\x02", False),
]
"""Properties of a client, and whether others fill the record up to its cap."""


@pytest.mark.slow
async def test_odd_properties_are_rolled_and_delivered_as_they_are(
    leader: LeaderServices, nursery: trio.Nursery
) -> None:
    for given, fill in ODD:
        leader.store(TIMER_TOPIC, timed(leader, 2.5 * DAY_S, given, fill=fill), given[:20])
    nursery.start_soon(leader.serve)
    await trio.sleep(2.1 * DAY_S)
    assert leader.group.state.max_offset(TIMER_TOPIC, 0) == 2 * len(ODD), "rolled once"
    assert leader.read("T") == []
    await trio.sleep(0.5 * DAY_S)
    delivered = {bytes(record.body): record.properties for record in leader.read("T")}
    assert delivered.keys() == {given[:20] for given, _ in ODD}
    for given, _ in ODD:
        if b"ROLL" not in given and b"noseparator" not in given:
            assert given in delivered[given[:20]]
    assert not len(leader.group.state.timers)


async def test_odd_properties_pass_a_delay_level(
    leader: LeaderServices, nursery: trio.Nursery
) -> None:
    for given, fill in ODD:
        properties = with_real_destination(given, "T", 0)
        leader.store(SCHEDULE_TOPIC, filled(properties) if fill else properties, given[:20])
    nursery.start_soon(leader.serve)
    await trio.sleep(2)
    assert [bytes(record.body) for record in leader.read("T")] == [given[:20] for given, _ in ODD]


NO_WAY = [
    pytest.param(b"", "no real topic", id="no topic"),
    pytest.param(b"REAL_TOPIC\x01T\x02", "no real topic", id="no queue"),
    pytest.param(b"REAL_TOPIC\x01T\x02REAL_QID\x01x\x02", "no number", id="a queue that is none"),
    pytest.param(b"REAL_TOPIC\x01T\x02REAL_QID\x01-3\x02", "no number", id="a queue below 0"),
    pytest.param(
        b"REAL_TOPIC\x01T\x02REAL_QID\x01%b\x02" % (b"1" * 12), "no number", id="no such queue"
    ),
    pytest.param(b"REAL_TOPIC\x01\xff\x02REAL_QID\x010\x02", "illegal", id="no UTF-8"),
    pytest.param(
        b"REAL_TOPIC\x01%b\x02REAL_QID\x010\x02" % TIMER_TOPIC.encode(),
        "a system topic",
        id="a system topic",
    ),
    pytest.param(b"REAL_TOPIC\x01../T\x02REAL_QID\x010\x02", "illegal", id="a path"),
    pytest.param(
        b"REAL_TOPIC\x01%b\x02REAL_QID\x010\x02" % (b"t" * 32_000), "longer", id="a long topic"
    ),
]


def was_set_aside(leader: LeaderServices, service: str, reason: str, body: bytes) -> None:
    (letter,) = leader.read(SET_ASIDE_TOPIC)
    found = letter.property_map
    assert bytes(letter.body) == body
    assert found["SET_ASIDE_BY"] == service
    assert reason in found["SET_ASIDE_REASON"]
    assert leader.group.state.topic_config(SET_ASIDE_TOPIC) is not None
    assert leader.group.service_counts.set_aside == Counter({service: 1})


WAYS = [
    pytest.param(SCHEDULE_TOPIC, "delay_levels", id="delay level"),
    pytest.param(TIMER_TOPIC, "timer", id="timer"),
    pytest.param(HALF_TOPIC, "transactions", id="half message"),
]


@pytest.mark.parametrize(("topic", "service"), WAYS)
@pytest.mark.parametrize(("properties", "reason"), NO_WAY)
async def test_what_goes_nowhere_is_set_aside(
    leader: LeaderServices,
    nursery: trio.Nursery,
    properties: bytes,
    reason: str,
    topic: str,
    service: str,
) -> None:
    due = b"TIMER_OUT_MS\x01%d\x02" % (leader.clock.wall_ms() + 1000) if service == "timer" else b""
    at = leader.store(topic, b"UNIQ_KEY\x01K\x02PGROUP\x01p\x02" + properties + due, b"hostile")
    if topic != HALF_TOPIC:
        waiting(leader, topic, b"next")
    nursery.start_soon(leader.serve)
    await trio.sleep(60)
    was_set_aside(leader, service, reason, b"hostile")
    (letter,) = leader.read(SET_ASIDE_TOPIC)
    assert letter.property_map["UNIQ_KEY"] == "K"
    assert letter.property_map["SET_ASIDE_POSITION"] == str(at)
    if topic != HALF_TOPIC:
        assert [bytes(record.body) for record in leader.read("T")] == [b"next"]
    assert leader.group.state.delay_progress == ({1: 2} if topic == SCHEDULE_TOPIC else {})
    assert not len(leader.group.state.timers)
    assert not leader.group.state.transactions.open


def waiting(leader: LeaderServices, topic: str, body: bytes) -> int:
    properties = with_real_destination(b"PGROUP\x01p\x02", "T", 0)
    if topic == TIMER_TOPIC:
        properties = timed(leader, 1, b"")
    return leader.store(topic, properties, body)


@pytest.mark.parametrize(("topic", "service"), WAYS)
async def test_a_damaged_message_waits_for_the_copy_of_another_member(
    leader: LeaderServices, nursery: trio.Nursery, topic: str, service: str
) -> None:
    at = waiting(leader, topic, b"damaged")
    flip_bit(leader.root, at + BODY_AT)
    nursery.start_soon(leader.serve)
    await trio.sleep(10 * DAMAGE_FINAL_S)
    assert leader.read("T") == leader.read(SET_ASIDE_TOPIC) == []
    assert set(leader.group.damage_reports) == {(at, 1)}
    flip_bit(leader.root, at + BODY_AT)
    await trio.sleep(40)
    if topic == HALF_TOPIC:
        assert len(leader.group.state.transactions.open) == 1
    else:
        assert [bytes(record.body) for record in leader.read("T")] == [b"damaged"]
    assert leader.read(SET_ASIDE_TOPIC) == []


@pytest.mark.parametrize(("topic", "service"), WAYS)
async def test_the_only_member_sets_aside_what_stays_damaged(
    leader: LeaderServices, nursery: trio.Nursery, topic: str, service: str
) -> None:
    leader.group.has_other_members = False
    at = waiting(leader, topic, b"damaged")
    waiting(leader, topic, b"next")
    flip_bit(leader.root, at + BODY_AT)
    nursery.start_soon(leader.serve)
    await trio.sleep(DAMAGE_FINAL_S - 10)
    assert leader.read(SET_ASIDE_TOPIC) == []
    await trio.sleep(40)
    was_set_aside(
        leader, service, "damaged", b"The message at position %d of the log cannot be copied." % at
    )
    if topic == HALF_TOPIC:
        assert list(leader.group.state.transactions.open) == [1]
    else:
        assert [bytes(record.body) for record in leader.read("T")] == [b"next"]


async def test_what_waits_goes_into_a_queue_the_topic_has(
    leader: LeaderServices, nursery: trio.Nursery
) -> None:
    due = due_ms(leader.clock.wall_ms() + 2000)
    leader.store(SCHEDULE_TOPIC, with_real_destination(b"", "T", 3), b"level")
    leader.store(TIMER_TOPIC, timed_properties(b"", "T", 3, due), b"timer")
    leader.broker.make_topic("T", 2)
    nursery.start_soon(leader.serve)
    await trio.sleep(3)
    assert leader.bodies("T", 1) == [b"level", b"timer"]


@pytest.mark.parametrize(("topic", "service"), WAYS)
async def test_lost_place_of_an_entry_sets_no_message_aside(
    leader: LeaderServices, monkeypatch: pytest.MonkeyPatch, topic: str, service: str
) -> None:
    """Another member has it; this one stops and makes its index of entries again."""
    waiting(leader, topic, b"whole")

    def lost(_position: int) -> int:
        raise CorruptStoreError("the unit of an entry is damaged or missing")

    monkeypatch.setattr(leader.group.log, "index_of", lost)
    with pytest.RaisesGroup(CorruptStoreError, flatten_subgroups=True), trio.fail_after(10):
        await leader.serve()
    assert leader.read("T") == leader.read(SET_ASIDE_TOPIC) == []
    assert leader.group.service_counts.set_aside[service] == 0


async def test_only_member_notes_what_has_lost_its_place(
    leader: LeaderServices, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """No member could repair it: the node would stop again and again."""
    leader.group.has_other_members = False
    at = waiting(leader, SCHEDULE_TOPIC, b"lost")

    def lost(_position: int) -> int:
        raise CorruptStoreError("the unit of an entry is damaged or missing")

    monkeypatch.setattr(leader.group.log, "index_of", lost)
    nursery.start_soon(leader.serve)
    await trio.sleep(20)
    was_set_aside(
        leader,
        "delay_levels",
        "the unit of an entry",
        f"The message at position {at} of the log cannot be copied.".encode(),
    )
