"""Batches in record layout: checked in bulk, patched, answered run by run.

Whatever a client writes into properties: services of the broker do not take it for their own.
"""

import random
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.commitlog.properties import (
    MAX_CLIENT_PROPERTIES_BYTES,
    MAX_PROPERTIES_BYTES,
    OWNED_NAMES,
)
from dledger.commitlog.record import Record, decode_record, encode_record, iter_records, pack_host
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.processors.send_records import _MARKS, SEARCHED_BYTES, _may_be_marked
from dledger.processors.transactions import CheckBack
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.topic_names import (
    DLQ_PREFIX,
    HALF_TOPIC,
    SET_ASIDE_TOPIC,
    STATE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from dledger.services.stored_record import StoredRecords
from dledger.testing.doubles import EPOCH_MS
from tests.harness.broker import Broker
from tests.harness.leader_services import DAY_S, LeaderServices

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


HOSTILE = "".join(
    f"{name}\x01{value}\x02"
    for name in OWNED_NAMES
    for value in ("abc", "RMQ_SYS_DLEDGER_STATE", "99999999999999999999")
)
OWN = "KEYS\x01k\x02UNIQ_KEY\x01K\x02"


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[LeaderServices]:
    leader = LeaderServices(tmp_path)
    yield leader
    leader.group.close()


def by_10(leader: LeaderServices, properties: str) -> RemotingCommand:
    return leader.send(properties)


def by_310(leader: LeaderServices, properties: str) -> RemotingCommand:
    fields = {
        "a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": properties,
    }  # fmt: skip
    return leader.broker.call(RequestCode.SEND_MESSAGE_V2, fields, b"body")


def by_batch(leader: LeaderServices, properties: str) -> RemotingCommand:
    fields = {
        "a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": "", "m": "true",
    }  # fmt: skip
    body = encode_batch([BatchItem(b"body", properties.encode(), 0)])
    return leader.broker.call(RequestCode.SEND_BATCH_MESSAGE, fields, body)


def by_records(leader: LeaderServices, properties: str) -> RemotingCommand:
    record = encode_record(topic="T", queue_id=0, body=b"body", properties=properties.encode())
    ext = {"group": "p", "runs": [["T", 0, 1]], "timeout_ms": 3000}
    body = struct.pack(">I", len(record)) + record
    answer = leader.broker.call(RequestCode.SEND_RECORDS, ext, body)
    code, _, *remark = answer.ext["results"][0]
    answer.code, answer.remark = code, "".join(remark)
    return answer


WAYS = [by_10, by_310, by_batch, by_records]
Send = Callable[[LeaderServices, str], RemotingCommand]


@pytest.mark.parametrize("send", WAYS)
async def test_what_brokers_own_is_taken_out_on_every_way(
    leader: LeaderServices, send: Send
) -> None:
    assert send(leader, HOSTILE + OWN + HOSTILE).code == 0
    (record,) = leader.read("T")
    assert record.property_map.keys() - {"CLUSTER"} == {"KEYS", "UNIQ_KEY"}
    assert bytes(record.body) == b"body"


@pytest.mark.parametrize("send", WAYS)
async def test_client_gets_the_rest_of_a_records_space(leader: LeaderServices, send: Send) -> None:
    # A UNIQ_KEY counts as the broker's own: one is there in any case.
    rest = MAX_CLIENT_PROPERTIES_BYTES - len("KEYS\x01k\x02F\x01\x02")
    assert send(leader, f"{OWN}F\x01{'x' * rest}\x02").code == 0
    answer = send(leader, f"{OWN}F\x01{'x' * (rest + 1)}\x02")
    assert answer.code == 13
    assert f"at most {MAX_CLIENT_PROPERTIES_BYTES}" in (answer.remark or "")
    assert "nothing was stored" in (answer.remark or "")
    whole = MAX_PROPERTIES_BYTES - len(OWN) - len("F\x01\x02")
    assert send(leader, f"{OWN}F\x01{'x' * whole}\x02").code == 13
    assert len(leader.read("T")) == 1


@pytest.mark.parametrize("group", ["x\x02REAL_TOPIC\x01A", "", "g" * 300])
async def test_a_half_message_has_a_producer_group_that_can_be_one(
    leader: LeaderServices, group: str
) -> None:
    answer = leader.send("TRAN_MSG\x01true\x02", producerGroup=group)
    assert answer.code == 13
    assert leader.read(HALF_TOPIC) == []


def full(first: str) -> str:
    """Return properties that begin with *first* and are as long as a client's may be."""
    size = MAX_CLIENT_PROPERTIES_BYTES - len(first + OWN) - len("F\x01\x02")
    return f"{first}{OWN}F\x01{'x' * size}\x02"


def kept(record: Record) -> int:
    return len(record.property_map.get("F", ""))


@pytest.mark.slow
async def test_the_longest_properties_pass_every_service(
    leader: LeaderServices, nursery: trio.Nursery
) -> None:
    questions: list[int] = []

    class Producers(CheckBack):
        def is_there(self, group: str) -> bool:
            return True

        def ask(self, half: Any, checks: int) -> bool:
            questions.append(len(half.question(checks)))
            return True

    leader.services[2]._producers = Producers(
        leader.broker.processors.clients, leader.broker.settings
    )
    nursery.start_soon(leader.serve)
    await trio.sleep(0.1)
    nursery.start_soon(leader.settle_kicked)
    leader.group.kick()
    for first in ("DELAY\x011\x02", "TIMER_DELAY_SEC\x01200000\x02", "TRAN_MSG\x01true\x02"):
        assert leader.send(full(first), producerGroup="p" * 255).code == 0
    await trio.sleep(3 * DAY_S)
    delayed, rolled = leader.read("T")
    assert kept(delayed) > 29_000
    assert kept(rolled) > 29_000
    assert rolled.property_map["TIMER_ROLL_TIMES"] == "1"
    (given_up,) = leader.read(TRANS_CHECK_MAX_TIME_TOPIC)
    assert kept(given_up) > 29_000
    assert len(questions) == 15
    assert leader.read(SET_ASIDE_TOPIC) == []
    nursery.cancel_scope.cancel()


async def test_the_longest_properties_are_retried_and_given_up(leader: LeaderServices) -> None:
    group = "g" * 240
    assert leader.send(full("RETRY_TOPIC\x01" + "x" * 20_000 + "\x02")).code == 0
    (record,) = leader.read("T")
    for level, topic in ((1, "SCHEDULE_TOPIC_XXXX"), (-1, DLQ_PREFIX + group)):
        ext = {"offset": str(record.phy_offset), "group": group, "delayLevel": str(level)}
        answer = leader.broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, ext)
        assert answer.code == 0, answer.remark
        (copy,) = leader.read(topic)
        assert kept(copy) > 9_000
        assert copy.property_map["RETRY_TOPIC"] == "T", "no topic has a name of 20,000 bytes"


async def test_old_message_without_space_is_a_dead_letter(leader: LeaderServices) -> None:
    fill = b"x" * (MAX_PROPERTIES_BYTES - len(b"UNIQ_KEY\x01K\x02F\x01\x02"))
    at = leader.store("T", b"UNIQ_KEY\x01K\x02F\x01%b\x02" % fill)
    ext = {"offset": str(at), "group": "g", "delayLevel": "0"}
    assert leader.broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, ext).code == 0
    assert leader.read("SCHEDULE_TOPIC_XXXX") == []
    (letter,) = leader.read(DLQ_PREFIX + "g")
    found = letter.property_map
    assert (bytes(letter.body), found["UNIQ_KEY"]) == (b"body", "K")
    assert found["SET_ASIDE_BY"] == "retries"
    assert "properties have" in found["SET_ASIDE_REASON"]
    assert leader.group.service_counts.set_aside["retries"] == 1


@pytest.mark.parametrize("times", [-(2**31), -100, 2**31 - 1])
async def test_no_count_of_retries_leads_out_of_the_levels(
    leader: LeaderServices, times: int
) -> None:
    assert leader.send(OWN, reconsumeTimes=str(times)).code == 0
    (record,) = leader.read("T")
    assert StoredRecords(leader.group).read(record.phy_offset).reconsume_times == times
    ext = {
        "offset": str(record.phy_offset),
        "group": "g",
        "delayLevel": "0",
        "maxReconsumeTimes": str(2**31 - 1),
    }
    leader.broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, ext)
    queues = [queue for topic, queue in leader.group.state.queues if topic == "SCHEDULE_TOPIC_XXXX"]
    assert all(0 <= queue < 18 for queue in queues)
    (copy,) = [
        *leader.read(DLQ_PREFIX + "g"),
        *(record for queue in queues for record in leader.read("SCHEDULE_TOPIC_XXXX", queue)),
    ]
    assert copy.reconsume_times == min(times + 1, 2**31 - 1)
