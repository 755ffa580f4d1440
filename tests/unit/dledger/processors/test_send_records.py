"""Batches in record layout: checked in bulk, patched, answered run by run."""

import random
import struct
from typing import Any

import pytest

from dledger.commitlog.record import decode_record, encode_record, iter_records, pack_host
from dledger.processors.send_records import _MARKS, SEARCHED_BYTES, _may_be_marked
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.testing.doubles import EPOCH_MS
from tests.harness.broker import Broker

RECORDS = RequestCode.SEND_RECORDS


def rec(topic: str = "T", queue_id: int = 0, body: bytes = b"hello", **more: Any) -> bytes:
    properties = more.pop("properties", b"UNIQ_KEY\x01K\x02")
    return encode_record(topic=topic, queue_id=queue_id, body=body, properties=properties, **more)


def send(broker: Broker, runs: Any, records: list[bytes], **ext: Any) -> RemotingCommand:
    body = struct.pack(f">{len(records)}I", *map(len, records)) + b"".join(records)
    return broker.call(RECORDS, {"group": "p", "runs": runs, "timeout_ms": 3000, **ext}, body)


def stored_at(broker: Broker, position: int, count: int) -> list[Any]:
    first = decode_record(bytes(broker.group.log.record_at(position)))
    total = 0
    for _ in range(count):
        size = decode_record(bytes(broker.group.log.record_at(position + total))).size
        total += size
    assert first.phy_offset == position
    return list(iter_records(bytes(broker.group.log.read(position, total))))


@pytest.mark.parametrize(
    ("client", "host", "grown"), [("10.1.2.3", "127.0.0.1", 0), ("2001:db8::2", "::1", 24)]
)
def test_runs_are_stored_one_behind_the_other_with_their_places(
    broker: Broker, client: str, host: str, grown: int
) -> None:
    broker.listen_at(host)
    broker.connection.peer_address = (client, 4567)
    broker.make_topic("T")
    records = [rec("T", 1, b"a"), rec("T", 1, b"b"), rec("U", 0, b"c", born_timestamp_ms=5)]
    response = send(broker, [["T", 1, 2], ["U", 0, 1]], records)
    assert response.code == 0
    assert response.ext["results"] == [[0, 0], [0, 0]]
    assert response.ext["store_host"] == pack_host(host, 10911)
    assert response.ext["grown_bytes"] == grown
    assert response.ext["store_time_ms"] == EPOCH_MS
    found = stored_at(broker, response.ext["phy_offset"], 3)
    assert [bytes(item.body) for item in found] == [b"a", b"b", b"c"]
    assert [item.queue_offset for item in found] == [0, 1, 0]
    assert [item.size for item in found] == [len(record) + grown for record in records]
    assert {item.born_host for item in found} == {(client, 4567)}
    assert {item.store_host for item in found} == {(host, 10911)}
    assert found[2].born_timestamp_ms == 5
    assert send(broker, [["T", 1, 1]], [rec("T", 1)]).ext["results"] == [[0, 2]]


def test_missing_topics_are_made_in_the_same_entry(broker: Broker) -> None:
    records = [rec("New", 3), rec("%RETRY%g", 0)]
    response = send(
        broker, [["New", 3, 1], ["%RETRY%g", 0, 1]], records, default_topic_queue_nums=5
    )
    assert response.ext["results"] == [[0, 0], [0, 0]]
    assert broker.group.state.topic_config("New").queue_nums == 5  # type: ignore[union-attr]  # None fails the test
    assert broker.group.state.topic_config("%RETRY%g").queue_nums == 1  # type: ignore[union-attr]  # None fails the test
    assert broker.group.log.last_index == 1
    (first, second) = stored_at(broker, response.ext["phy_offset"], 2)
    assert (first.topic, second.topic) == ("New", "%RETRY%g")


def test_refused_runs_are_left_out_and_the_others_stored(broker: Broker) -> None:
    broker.make_topic("T", 2)
    broker.make_topic("ReadOnly", perm=4)
    runs = [
        ["ReadOnly", 0, 1],
        ["T", 0, 2],
        ["T", 2, 1],
        [STATE_TOPIC, 0, 1],
        ["T", 1, 1],
        ["a/b", 0, 1],
    ]
    records = [
        rec("ReadOnly"),
        rec(body=b"1"),
        rec(body=b"2"),
        rec(queue_id=2),
        rec(STATE_TOPIC),
        rec(queue_id=1, body=b"3"),
        rec("a/b"),
    ]
    response = send(broker, runs, records)
    results = response.ext["results"]
    assert [result[0] for result in results] == [16, 0, 29, 16, 0, 1]
    assert [result[1] for result in results] == [-1, 0, -1, -1, 0, -1]
    assert "forbidden" in results[0][2]
    found = stored_at(broker, response.ext["phy_offset"], 3)
    assert [bytes(item.body) for item in found] == [b"1", b"2", b"3"]


def test_when_all_runs_are_refused_nothing_is_proposed(broker: Broker) -> None:
    response = send(broker, [[STATE_TOPIC, 0, 1]], [rec(STATE_TOPIC)])
    assert response.code == 0
    assert response.ext["results"][0][0] == 16
    assert broker.group.waiting == 0


@pytest.mark.parametrize("name", ["DELAY", "TRAN_MSG", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
def test_messages_that_ask_for_more_than_an_append_are_refused(broker: Broker, name: str) -> None:
    broker.make_topic("T")
    records = [rec(), rec(queue_id=1, properties=f"{name}\x011\x02".encode())]
    results = send(broker, [["T", 0, 1], ["T", 1, 1]], records).ext["results"]
    assert results[0] == [0, 0]
    assert results[1][0] == 13
    assert name in results[1][2]


def test_body_like_a_property_stays_a_body(broker: Broker) -> None:
    broker.make_topic("T")
    response = send(broker, [["T", 0, 1]], [rec(body=b"\x02DELAY\x013\x02")])
    assert response.ext["results"] == [[0, 0]]


@pytest.mark.parametrize(
    ("runs", "remark"),
    [
        (None, "runs must be a list"),
        ([], "runs must be a list"),
        ([["T", 0]], r"a run is \[topic"),
        ([["T", "0", 1]], r"a run is \[topic"),
        ([["T", 0, 0]], "a run of 0 records"),
        ([["T", -1, 1]], "queue -1"),
        ([["T", 0, 10_000]], "cannot hold 10000 records"),
        ([["T", 0, True]], r"a run is \[topic"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(broker: Broker, runs: Any, remark: str) -> None:
    import re

    response = send(broker, runs, [rec()])
    assert (response.code, response.ext["outcome"]) == (1, "not_stored")
    assert re.search(remark, response.remark or "")


@pytest.mark.parametrize(
    ("records", "runs"),
    [
        ([rec("T", 1)], [["T", 0, 1]]),
        ([rec("U", 0)], [["T", 0, 1]]),
        ([rec()[:-1] + b"!"], [["T", 0, 2]]),
        ([rec(sys_flag=4)], [["T", 0, 1]]),
        ([rec(body=b"")], [["T", 0, 1]]),
        ([rec(body=b"x" * 4097)], [["T", 0, 1]]),
        ([rec().replace(b"hello", b"jello")], [["T", 0, 1]]),
        ([rec() + b"\0"], [["T", 0, 1]]),
    ],
)
def test_records_that_are_not_what_they_say_are_refused_whole(
    broker: Broker, records: list[bytes], runs: Any
) -> None:
    broker.make_topic("T")
    response = send(broker, runs, records)
    assert response.code in (1, 13)
    assert response.ext["outcome"] == "not_stored"
    assert broker.group.waiting == 0


def test_unknown_outcome_is_answered(broker: Broker) -> None:
    broker.make_topic("T")
    body = struct.pack(">I", len(rec())) + rec()
    broker.handle(request(RECORDS, {"runs": [["T", 0, 1]]}, body))
    broker.group.append()
    broker.group.step_down()
    assert broker.connection.reply_.code == 1
    assert broker.connection.reply_.ext["outcome"] == "unknown"


@pytest.mark.parametrize("mark", _MARKS)
@pytest.mark.parametrize("before", [0, 1, 3 * SEARCHED_BYTES])
def test_send_records_finds_each_mark_among_any_bytes(mark: bytes, before: int) -> None:
    rng = random.Random(before)
    other = [rng.randbytes(before), rng.randbytes(2 * SEARCHED_BYTES)]
    plain = [data.replace(b"\x01", b"\x02") for data in other]
    assert not _may_be_marked(b"_".join(plain), ())
    for around in (plain, other):
        assert _may_be_marked(around[0] + mark + b"_" + around[1], ())
    # A name that only ends as it does.
    assert not _may_be_marked(plain[0] + b"_" + mark[-3:] + plain[1], ())
