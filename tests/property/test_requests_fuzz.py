"""No request makes a processor fall over: it answers, defers, or raises an error of ours.

What a client sends as SEND_RECORDS is refused or stored; the log is whole.
Damaged registrations are refused with one kind of error, whatever the damage.
A snapshot that a peer made up is refused, whatever stands in it under a valid checksum.
"""

import random
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import cbor2
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.entry import parse_header, record_sizes
from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError, InvariantBroken, MQError
from dledger.commitlog.record import encode_record, iter_records
from dledger.namesrv.errors import BadRegisterBodyError
from dledger.namesrv.registration import decode_register_body
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.bodies import RegisterBrokerBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.state.snapshot import framed, snapshot
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.extent import examples
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch
from tests.harness.registrations import encode_compressed
from tests.unit.namesrv.world import register_body

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


RUNS: list[list[Any]] = [["T", 0, 3], ["T", 1, 2], ["U", 0, 1]]


def good_body() -> bytes:
    records = [
        encode_record(
            topic=topic,
            queue_id=queue_id,
            body=b"body %d" % i,
            properties=b"UNIQ_KEY\x01K\x02TAGS\x01A\x02",
        )
        for topic, queue_id, count in RUNS
        for i in range(count)
    ]
    return struct.pack(f">{len(records)}I", *map(len, records)) + b"".join(records)


BODY = good_body()

mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "double", "insert"]),
        st.integers(0, len(BODY) - 1),
        st.integers(0, 255),
    ),
    max_size=3,
)
scalars = st.one_of(
    st.integers(-3, 1 << 33), st.text(max_size=5), st.booleans(), st.binary(max_size=3)
)
odd_runs = st.one_of(
    st.just(RUNS), st.just(RUNS), st.lists(st.lists(scalars, max_size=4), max_size=4), scalars
)


def mutated(body: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    for kind, at, value in changes:
        at = min(at, max(0, len(body) - 1))
        if kind == "flip":
            body = body[:at] + bytes([value]) + body[at + 1 :]
        elif kind == "cut":
            body = body[:at]
        elif kind == "double":
            body = body[:at] + body[at : at + value] + body[at:]
        else:
            body = body[:at] + bytes([value]) + body[at:]
    return body


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(mutations, odd_runs), min_size=1, max_size=6))
def test_mutated_batches_are_refused_or_stored(attempts: list[tuple[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        group = FakeGroup(Path(folder), ManualClock())
        broker = Broker(group)
        broker.make_topic("T")
        for changes, runs in attempts:
            connection = FakeConnection()
            body = mutated(BODY, changes)
            command = request(RequestCode.SEND_RECORDS, {"group": "p", "runs": runs}, body)
            handled = broker.handle(command, connection)
            if handled is DEFERRED:
                group.settle()
                handled = connection.reply_
            assert isinstance(handled, RemotingCommand)
            if not changes and runs == RUNS:
                assert [code for code, *_ in handled.ext["results"]] == [0, 0, 0]
        for index in range(1, group.log.last_index + 1):
            frame = group.log.frame(index)
            header = parse_header(frame)
            records = list(iter_records(frame[header.body_start :]))
            assert len(records) == len(record_sizes(frame, header))
        group.close()


SAMPLE = register_body(["T1", "T2"], counter=5, filters=["f:1"])
PLAIN = SAMPLE.encode()
INFLATED = zlib.decompress(encode_compressed(SAMPLE))

edits = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), min_size=1, max_size=4)


def damaged(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    for place, piece in changes:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + len(piece) // 2 :]
    return data


@given(edits)
def test_damaged_json_is_read_or_refused(changes: list[tuple[int, bytes]]) -> None:
    read_or_refused(damaged(PLAIN, changes), compressed=False)


@given(edits, st.booleans())
def test_damaged_compressed_bodies_are_read_or_refused(
    changes: list[tuple[int, bytes]], inside: bool
) -> None:
    if inside:
        read_or_refused(zlib.compress(damaged(INFLATED, changes)), compressed=True)
    else:
        read_or_refused(damaged(zlib.compress(INFLATED), changes), compressed=True)


def read_or_refused(data: bytes, *, compressed: bool) -> None:
    try:
        body = decode_register_body(data, compressed=compressed, crc=0)
    except BadRegisterBodyError as error:
        assert "registration cannot be read" in str(error)  # noqa: PT017  # only some bodies are refused
    else:
        assert isinstance(body, RegisterBrokerBody)


HOSTILE: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**40, 2**63, 2**200, 1.5, "", "x", b"", b"x",
    [],
    {},
    [[]],
    True,
)  # fmt: skip

CHANGES = 3000

HEADER_BYTES = 24


def changed(rng: random.Random, value: Any) -> Any:
    """Return *value* with one thing in it, at any depth, that should not be there."""
    if rng.random() < 0.3 or not isinstance(value, list | dict) or not value:
        return rng.choice(HOSTILE)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(sorted(value, key=repr))
    if rng.random() < 0.1:
        return {other: kept for other, kept in value.items() if other != key}
    return {**value, key: changed(rng, value[key])}


@pytest.mark.usefixtures("autojump_clock")
async def test_a_made_up_snapshot_is_refused_or_read(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"a"))
        store, rng = leader.group.store, random.Random(3)
        honest = cbor2.loads(snapshot(leader.group.state)[HEADER_BYTES:])
        ends: Counter[str] = Counter()
        for _ in range(examples(CHANGES)):
            body = cbor2.dumps(changed(rng, honest))
            try:
                store.decode(framed(body))
                ends["read"] += 1
            except (CorruptStoreError, ForeignStoreError):
                ends["refused"] += 1
        assert min(ends["read"], ends["refused"]) > 0, ends
