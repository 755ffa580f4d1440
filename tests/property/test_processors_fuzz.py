"""No request makes a processor fall over: it answers, defers, or raises an error of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import InvariantBroken, MQError
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.extent import examples
from tests.harness.fake_group import FakeConnection, FakeGroup

FIELDS = [
    *"abcdefghijklmn",
    "producerGroup", "consumerGroup", "topic", "defaultTopic", "defaultTopicQueueNums",
    "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset", "suspendTimeoutMillis",
    "subscription", "subVersion", "expressionType", "maxMsgBytes", "timestamp", "boundaryType",
    "offset", "clientID", "readQueueNums", "writeQueueNums", "perm", "topicFilterType", "order",
    "attributes", "properties", "bornTimestamp", "flag", "batch", "sync", "setZeroIfNotFound",
    "key", "maxNum", "beginTimestamp", "endTimestamp", "_UNIQUE_KEY_QUERY", "index", "count",
    "isOrder", "group", "topicList",
]  # fmt: skip
values = st.one_of(
    st.sampled_from(["T", "TBW102", "0", "1", "-1", "4", "2", "true", "*", "A || B", "SQL92", ""]),
    st.integers(-(1 << 65), 1 << 65),
    st.integers(-(1 << 40), 1 << 40).map(str),
    st.text(max_size=6),
    st.binary(max_size=4),
    st.booleans(),
)
# Mostly whole requests, with some fields replaced or missing.
base = {
    **dict.fromkeys("adefghjl", "0"),
    "a": "p", "b": "T", "c": "TBW102", "d": "4", "i": "DELAY\x011\x02", "producerGroup": "p",
    "consumerGroup": "g", "topic": "T", "defaultTopic": "TBW102",
    **dict.fromkeys(
        ["defaultTopicQueueNums", "queueId", "queueOffset", "subVersion", "commitOffset"], "0"
    ),
    "maxMsgNums": "32", "sysFlag": "6", "suspendTimeoutMillis": "1000", "timestamp": "5",
    "offset": "76", "clientID": "c", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6",
    "topicFilterType": "SINGLE_TAG", "order": "false", "key": "k", "maxNum": "8",
    "beginTimestamp": "0", "endTimestamp": "4000000000000", "index": "0", "count": "5",
    "isOrder": "false", "group": "g", "bornTimestamp": "1", "flag": "0",
}  # fmt: skip
exts = st.tuples(
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=5),
    st.sets(st.sampled_from(FIELDS), max_size=2),
).map(lambda item: {key: value for key, value in {**base, **item[0]}.items() if key not in item[1]})
bodies = st.one_of(
    st.binary(max_size=40),
    st.just(b"hello"),
    st.just(b'{"clientID":"c","consumerDataSet":[{"groupName":"g"}]}'),
    st.just(b'{"clientID":1,"consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{}]}]}'),
)

CODES = sorted(
    {10, 310, 320, 51101, 11, 361, 51103, 14, 15, 29, 30, 31, 32, 33, 34, 35, 38, 46}
    | {12, 208, 303, 317, 321, 17, 215, 21, 351, 202, 28, 51100, 51102, 51110}
)


async def answered(handled: Awaitable[object]) -> object:
    return await handled


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CODES), exts, bodies), min_size=1, max_size=12))
def test_any_request_is_answered(requests: list[tuple[int, dict[str, Any], bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        group = FakeGroup(Path(folder), ManualClock())
        broker = Broker(group)
        broker.make_topic("T")
        group.put("T", 0, b"x", b"y")
        for code, ext, body in requests:
            command = request(RequestCode(code), dict(ext), body)
            try:
                handled = broker.handle(command, FakeConnection())
                if isinstance(handled, Awaitable):
                    assert isinstance(trio.run(answered, handled), RemotingCommand)
            except InvariantBroken:
                pytest.fail("a request broke an invariant")
            except MQError:
                pass  # the connection answers it
            group.settle()
        trio.run(broker.processors.pull.sweep)
        group.close()
