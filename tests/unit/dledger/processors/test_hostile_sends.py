"""Whatever a client writes into properties: services of the broker do not take it for their own."""

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
from dledger.commitlog.record import Record, encode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.processors.transactions import CheckBack
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.topic_names import (
    DLQ_PREFIX,
    HALF_TOPIC,
    SET_ASIDE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from dledger.services.stored_record import StoredRecords
from tests.harness.leader_services import DAY_S, LeaderServices

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
