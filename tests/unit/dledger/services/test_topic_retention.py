"""A topic that keeps its messages for a time of its own: its queues begin later."""

import pytest
import structlog.testing

from dledger.commitlog.errors import InvariantBroken
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, GIVES_UP_FIELD, decode_given_up
from dledger.services.retention import RetentionService, expiring_queues, queue_floors, retention_ms
from dledger.settings.tables import StoreTable
from dledger.state.state_record import QueueFloorsChange, TopicsChange, state_batch
from dledger.state.topics import TopicConfig
from dledger.testing.doubles import ManualClock
from tests.harness import pulls
from tests.harness.broker import Broker, topic_fields
from tests.harness.fake_group import SEGMENT_BYTES, FakeGroup

HOUR_MS = 3_600_000


def make_topic(group: FakeGroup, topic: str, **attributes: str) -> None:
    config = TopicConfig(topic, 2, 2, attributes=attributes)
    group.store(TopicsChange(put=(config,)))


def fill(group: FakeGroup, clock: ManualClock, topic: str) -> None:
    """Store a message an hour, five in queue 0 and two in queue 1."""
    for hour in range(5):
        group.put(topic, 0, b"%d" % hour)
        if hour < 2:
            group.put(topic, 1, b"%d" % hour)
        clock.now_s += 3600


@pytest.mark.parametrize(
    ("attributes", "keeps_ms"), [({}, None), ({"retention.ms": "5"}, 5), ({"other": "x"}, None)]
)
def test_what_attributes_say(attributes: dict[str, str], keeps_ms: int | None) -> None:
    assert retention_ms(attributes) == keeps_ms


@pytest.mark.parametrize("value", ["", "0", "-1", "1h", "1.5", "٣", "9" * 20])
def test_what_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"retention\.ms is a number"):
        retention_ms({"retention.ms": value})


def test_queues_begin_at_the_first_kept_message(group: FakeGroup, clock: ManualClock) -> None:
    make_topic(group, "T", **{"retention.ms": str(3 * HOUR_MS)})
    make_topic(group, "kept")
    fill(group, clock, "T")
    fill(group, clock, "kept")
    now_ms = clock.wall_ms() - 5 * HOUR_MS
    queues = [*expiring_queues(group)]
    assert queue_floors(group, queues, now_ms, is_deleting=lambda _: False) == QueueFloorsChange(
        (("T", 0, 2), ("T", 1, 2)), now_ms, (("T", 3 * HOUR_MS),)
    )
    assert queue_floors(group, queues, now_ms, is_deleting=lambda topic: topic == "T") is None
    before_ms = now_ms - 3 * HOUR_MS
    assert queue_floors(group, queues, before_ms, is_deleting=lambda _: False) is None


async def test_leader_moves_them_and_readers_see_it(group: FakeGroup, clock: ManualClock) -> None:
    make_topic(group, "T", **{"retention.ms": str(3 * HOUR_MS)})
    fill(group, clock, "T")
    service = RetentionService(
        group,
        lambda: group.log,
        StoreTable(mapped_file_size_commit_log=SEGMENT_BYTES),
        clock=clock,
        saved_index=lambda: 0,
        disk_ratio=lambda: 0.0,
    )
    await service.check_topics()
    assert [group.state.min_offset("T", queue) for queue in (0, 1)] == [2, 2]
    index = group.state.applied_index
    await service.check_topics()
    assert group.state.applied_index == index  # nothing new, no entry
    broker = Broker(group)
    answer = pulls.pull(broker, queueOffset=1)
    assert answer.code == 21
    assert answer.ext["minOffset"] == "2"


def test_a_queue_never_begins_behind_its_end(group: FakeGroup) -> None:
    group.put("T", 0, b"x")
    group.propose(state_batch(QueueFloorsChange((("T", 0, 2),))), lambda _: None)
    with pytest.raises(InvariantBroken, match="begin at 2"):
        group.settle()


def test_the_attribute_is_checked_when_it_is_set(group: FakeGroup) -> None:
    broker = Broker(group)
    fields = topic_fields()
    refused = broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "attributes": "+retention.ms=soon"}
    )
    assert (refused.code, refused.ext["outcome"]) == (1, "not_stored")
    assert "retention.ms" in (refused.remark or "")
    taken = broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "attributes": "+retention.ms=1000"}
    )
    assert taken.code == 0


TOPIC_FIELDS = topic_fields(2)


def shorter(broker: Broker, keeps_ms: int, **fields: str) -> RemotingCommand:
    attributes = f"+retention.ms={keeps_ms}"
    return broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC, {**TOPIC_FIELDS, "attributes": attributes, **fields}
    )


def test_shorter_retention_needs_confirmation(group: FakeGroup, clock: ManualClock) -> None:
    make_topic(group, "T")
    fill(group, clock, "T")
    broker = Broker(group)
    asked = shorter(broker, 3 * HOUR_MS + 1)
    assert (asked.code, asked.ext["outcome"]) == (1, "not_stored")
    assert "dledger topic retention T" in (asked.remark or "")
    lost = decode_given_up(asked.ext[GIVES_UP_FIELD])
    assert (lost.messages, lost.segments) == ({"T": 4}, 0)
    assert group.state.topics["T"].attributes == {}
    with structlog.testing.capture_logs() as lines:
        assert shorter(broker, 3 * HOUR_MS + 1, **{CONFIRMED_FIELD: "true"}).code == 0
    assert group.state.topics["T"].attributes == {"retention.ms": str(3 * HOUR_MS + 1)}
    (line,) = [line for line in lines if line["event"] == "retention_shortened"]
    assert line["asked_by"] == broker.connection.peer_address[0]
    (change,) = group.applied[-1].changes
    assert isinstance(change, TopicsChange)
    assert change.asked_by == broker.connection.peer_address[0]
    # Longer is no loss, the same neither.
    assert shorter(broker, 4 * HOUR_MS).code == 0
    assert shorter(broker, 4 * HOUR_MS).code == 0
    assert shorter(broker, 3 * HOUR_MS).code == 1


def test_a_list_of_topics_is_asked_about_as_well(group: FakeGroup, clock: ManualClock) -> None:
    make_topic(group, "T")
    fill(group, clock, "T")
    broker = Broker(group)
    topics = [
        bodies.TopicConfig(topic_name=name, attributes={"retention.ms": "5"}) for name in "UT"
    ]
    body = bodies.TopicConfigList(topic_config_list=topics).encode()
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body).code == 1
    assert group.state.topics["T"].attributes == {}
    assert "U" not in group.state.topics
    fields = {CONFIRMED_FIELD: "true"}
    assert broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, fields, body).code == 0
    assert group.state.topics["T"].attributes == {"retention.ms": "5"}


def test_an_empty_topic_gives_up_nothing(group: FakeGroup) -> None:
    make_topic(group, "T")
    assert shorter(Broker(group), 5).code == 0
    assert shorter(Broker(group), 4).code == 0
