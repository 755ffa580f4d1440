"""Requests as other clients put them on the wire, byte by byte, and the bytes they are answered.

The requests in `tests/data/golden_frames.json` were made by the clients named there. The answers
are this broker's, compared once with the protocol facts; from then on they stay as they are.
"""

import json
from collections.abc import Awaitable
from typing import Any

import pytest

from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import FLAG_RESPONSE, RemotingCommand
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.services.pending_configs import KnownGroups
from dledger.state.state_record import ConsumerOffsetsChange
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.shipped_files import ROOT

FILE = ROOT / "tests" / "data" / "golden_frames.json"
GOLDEN: list[dict[str, Any]] = json.loads(FILE.read_text())


@pytest.fixture
def lived_in(group: FakeGroup) -> Broker:
    """A broker with a topic, three messages, a consumer group that has read one, and its client."""
    broker = Broker(group)
    broker.make_topic("T", 2)
    for number in range(3):
        properties = b"TAGS\x01A\x02KEYS\x01k%d\x02UNIQ_KEY\x01%032X\x02" % (number, number)
        group.put("T", 0, b"m%d" % number, properties=properties)
    group.store(ConsumerOffsetsChange.of((("g", "T", 0, 1), ("g", "T", 1, 0))))
    subscription = SubscriptionData(topic="T", sub_string="*", sub_version=1)
    heartbeat = HeartbeatData(
        client_id="c1", consumer_data_set=[ConsumerData("g", subscription_data_set=[subscription])]
    )
    KnownGroups(group, broker.processors.topics).make_known("g")
    broker.call(RequestCode.HEART_BEAT, {}, heartbeat.encode())
    return broker


async def answer(broker: Broker, command: RemotingCommand) -> bytes | None:
    """Return the frame that goes back; None when nothing does."""
    connection = FakeConnection()
    handled = broker.handle(command, connection)
    if isinstance(handled, Awaitable):
        handled = await handled
    if handled is DEFERRED:
        broker.group.settle()
        if not connection.replies:
            return None
        handled = connection.replies[-1][1]
    if command.is_oneway:
        return None
    assert isinstance(handled, RemotingCommand)
    handled.opaque, handled.serialize = command.opaque, command.serialize
    handled.flag = FLAG_RESPONSE
    return encode_command(handled)


@pytest.mark.parametrize(
    "golden",
    GOLDEN,
    ids=[f"{golden['client']}-{golden['code']}-{n}" for n, golden in enumerate(GOLDEN)],
)
async def test_a_recorded_request_is_read_and_answered_to_the_byte(
    lived_in: Broker, golden: dict[str, Any]
) -> None:
    (command,) = FrameDecoder().feed(golden["request"].encode("latin-1"))
    assert RequestCode(command.code).name == golden["code"]
    answered = await answer(lived_in, command)
    if "answer" not in golden:
        # Tables that grow with the broker: read, and answered with something.
        assert answered is not None
        assert FrameDecoder().feed(answered)[0].code == 0
        return
    expected = golden["answer"]
    assert answered == (None if expected is None else expected.encode("latin-1"))


def test_most_codes_that_clients_use_are_recorded() -> None:
    assert len({golden["code"] for golden in GOLDEN}) >= 30
    assert len({golden["client"] for golden in GOLDEN}) >= 3
