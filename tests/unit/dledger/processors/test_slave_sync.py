"""Tables that RocketMQ's slaves copy."""

from __future__ import annotations

import json

from dledger.state.state_record import ConsumerOffsetsChange, state_batch
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker


def test_all_consumer_offsets_are_told_by_any_member(broker: Broker) -> None:
    broker.make_topic("T")
    change = ConsumerOffsetsChange((("g", "T", 0, 5), ("g", "T", 1, 300), ("h", "T", 0, 1)))
    broker.group.propose(state_batch(change), lambda _: None)
    broker.group.settle()
    broker.group.step_down("elsewhere:1")
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_CONSUMER_OFFSET).body))
    assert body["offsetTable"] == {"T@g": {"0": 5, "1": 300}, "T@h": {"0": 1}}
    assert body["dataVersion"]["counter"] == broker.group.state.applied_index


def test_all_delay_offsets_are_told(broker: Broker) -> None:
    broker.group.state.delay_progress[3] = 8
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_DELAY_OFFSET).body))
    assert body["offsetTable"] == {"3": 8}
