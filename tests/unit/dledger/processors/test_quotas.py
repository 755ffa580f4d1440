"""Quotas before the handlers: what is held, what is refused, and under which name it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import structlog.testing

from dledger.commitlog.message_batch import BatchItem, encode_batch
from dledger.commitlog.record import encode_record, iter_records
from dledger.processors.metering import CONNECT_AGAIN_MS, given, sent_messages, sent_records
from dledger.processors.quotas import LIMIT_MAX
from dledger.remoting.access.gate import admit_as, admitted_account
from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.bodies import HeartbeatData, ProducerData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import OUTCOME_FIELD, RETRIABLE_FIELD, RETRY_AFTER_FIELD
from dledger.remoting.protocol.quota_bodies import QuotaInfo, QuotaList
from dledger.services.quota_buckets import RECEIVE_DELAY_MAX_S, SEND_DELAY_MAX_S, Cost
from dledger.state.quotas import QuotaConfig, QuotasChange
from dledger.state.state_record import state_batch
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import LEADER, FakeConnection, FakeGroup

CODE = RequestCode
V2 = {
    "a": "p",
    "b": "T",
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "g": "1699999999000",
    "h": "0",
    "i": "",
}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
}
POP = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "-1",
    "maxMsgNums": "32",
    "invisibleTime": "30000",
    "pollTime": "0",
    "bornTime": "0",
    "initMode": "0",
}


def put(broker: Broker, *quotas: QuotaConfig) -> None:
    broker.group.propose(state_batch(QuotasChange(quotas)), lambda _: None)
    broker.group.settle()


def of_account(name: str, connection: FakeConnection, *, is_admin: bool = False) -> None:
    """Let requests over a connection be those of an account, as the gate does."""
    admit_as(connection, name, "" if is_admin else name)  # type: ignore[arg-type]  # a fake with attributes


def send(
    broker: Broker, connection: FakeConnection | None = None, body: bytes = b"hello"
) -> RemotingCommand:
    return broker.call(CODE.SEND_MESSAGE_V2, dict(V2), body, connection=connection)


def beat(broker: Broker, connection: FakeConnection, client_id: str) -> RemotingCommand:
    body = HeartbeatData(client_id=client_id, producer_data_set=[ProducerData("p")]).encode()
    return broker.call(CODE.HEART_BEAT, {}, body, connection=connection)


def change(broker: Broker, **fields: Any) -> RemotingCommand:
    ext = {name: str(value) for name, value in {"op": "put", **fields}.items()}
    return broker.call(CODE.CHANGE_QUOTA, ext)


def listed(broker: Broker) -> list[QuotaInfo]:
    return QuotaList.decode(broker.call(CODE.LIST_QUOTAS).body).quotas


@pytest.fixture
def topic(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    broker.make_group("g")
    return broker


# ------------------------------------------------------------------------------ changes


def test_a_quota_is_put_changed_listed_and_deleted(broker: Broker) -> None:
    assert (
        change(broker, kind="account", name="orders", sentMessagesPerS=5, connections=2).code == 0
    )
    assert change(broker, kind="client", receivedBytesPerS=7).code == 0
    assert change(broker, kind="account", name="orders", sentBytesPerS=9).code == 0
    assert listed(broker) == [
        QuotaInfo(kind="account", name="orders", sent_bytes_per_s=9),
        QuotaInfo(kind="client", name="", received_bytes_per_s=7),
    ]
    assert change(broker, op="delete", kind="client").code == 0
    assert change(broker, op="delete", kind="client").code == 0, "it is deleted already"
    assert [quota.kind for quota in listed(broker)] == ["account"]


def test_a_repeated_change_is_answered_without_a_record(broker: Broker) -> None:
    change(broker, kind="client", sentMessagesPerS=5)
    before = broker.group.state.applied_index
    assert change(broker, kind="client", sentMessagesPerS=5).code == 0
    assert broker.group.state.applied_index == before


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"op": "drop", "kind": "client"}, "op 'drop' is not"),
        ({"kind": "topic"}, "kind 'topic' is not one of account, client"),
        ({"kind": "client", "name": "a" * 256}, "up to 255 printable"),
        ({"kind": "client", "name": " a"}, "no space at its ends"),
        ({"kind": "client", "name": "a\nb"}, "printable"),
        ({"kind": "client", "sentMessagesPerS": 0}, "sent_messages_per_s is 0"),
        ({"kind": "client", "connections": -1}, "connections is -1"),
        ({"kind": "client", "sentBytesPerS": LIMIT_MAX + 1}, "a limit is 1 to"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(
    broker: Broker, fields: dict[str, Any], text: str
) -> None:
    refused = change(broker, **fields)
    assert (refused.code, refused.ext[OUTCOME_FIELD]) == (ResponseCode.SYSTEM_ERROR, "not_stored")
    assert text in str(refused.remark)
    assert broker.group.state.quotas == {}


def test_a_change_is_for_the_leader(broker: Broker, group: FakeGroup) -> None:
    group.step_down()
    assert change(broker, kind="client").code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_a_change_has_an_audit_line(broker: Broker) -> None:
    with structlog.testing.capture_logs() as lines:
        change(broker, kind="account", name="orders", sentMessagesPerS=5)
        change(broker, op="delete", kind="client")
        broker.call(CODE.LIST_QUOTAS)
    acts = [(line["request"], line["subject"]) for line in lines if line["event"] == "audit"]
    assert acts == [
        ("CHANGE_QUOTA", "op=put account=orders sent_messages_per_s=5"),
        ("CHANGE_QUOTA", "op=delete client=(default)"),
    ]


# ------------------------------------------------------------------------------ sends


def test_sends_above_the_quota_are_stored_and_answered_late(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", sent_messages_per_s=10))
    connection = FakeConnection()
    assert {send(topic, connection).code for _ in range(15)} == {0}
    assert connection.held == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert topic.group.state.max_offset("T", 0) == 15


def test_sends_beyond_the_bound_are_refused_as_busy(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", sent_messages_per_s=10))
    connection = FakeConnection()
    answers = [send(topic, connection) for _ in range(30)]
    assert [answer.code for answer in answers] == [0] * 20 + [ResponseCode.SYSTEM_BUSY] * 10
    topic.group.settle()
    assert topic.group.state.max_offset("T", 0) == 20, "nothing refused is stored"
    refused = answers[-1]
    assert refused.ext[OUTCOME_FIELD] == "not_stored"
    assert refused.ext[RETRIABLE_FIELD] == "true"
    assert refused.ext["reason"] == "quota_exceeded"
    assert refused.ext[RETRY_AFTER_FIELD] == "0"
    assert "[QUOTA]client 10.1.2.3 is above its quota, nothing was stored" in str(refused.remark)
    assert connection.held[-10:] == [SEND_DELAY_MAX_S] * 10


def test_a_client_below_its_quota_is_not_held(topic: Broker, clock: ManualClock) -> None:
    put(topic, QuotaConfig("client", "", sent_messages_per_s=10, sent_bytes_per_s=100))
    connection = FakeConnection()
    for _ in range(40):
        assert send(topic, connection).code == 0
        clock.now_s += 0.1
    assert connection.held == []


def test_without_a_quota_no_bucket_is_made(topic: Broker) -> None:
    put(topic, QuotaConfig("account", "", sent_messages_per_s=1))
    connection = FakeConnection()
    for _ in range(5):
        assert send(topic, connection).code == 0
    assert (connection.held, len(topic.processors.metering.buckets)) == ([], 0)


def test_a_batch_counts_by_messages_and_bytes(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", sent_messages_per_s=10))
    connection = FakeConnection()
    items = encode_batch([BatchItem(b"x") for _ in range(15)])
    answer = topic.call(CODE.SEND_BATCH_MESSAGE, {**V2, "m": "true"}, items, connection=connection)
    assert answer.code == 0
    assert connection.held == pytest.approx([0.5])
    put(topic, QuotaConfig("client", "", sent_bytes_per_s=100))
    send(topic, connection, b"x" * 150)
    assert connection.held[1:] == pytest.approx([0.5])


def test_costs_are_read_of_requests_that_may_be_wrong() -> None:
    items = encode_batch([BatchItem(b"x" * 10), BatchItem(b"")])
    batch = request(CODE.SEND_BATCH_MESSAGE, {}, items)
    assert sent_messages(batch) == Cost(2, len(items))
    marked = request(CODE.SEND_MESSAGE_V2, {"m": True}, items)
    assert sent_messages(marked) == Cost(2, len(items))
    assert sent_messages(request(CODE.SEND_MESSAGE, {"batch": "false"}, items)).messages == 1
    broken = request(CODE.SEND_BATCH_MESSAGE, {}, b"\0" * 100)
    assert sent_messages(broken) == Cost(0, 100)
    record = encode_record(topic="T", queue_id=0, body=b"hello", properties=b"")
    body = np.array([len(record)] * 2, ">u4").tobytes() + record * 2
    runs: list[Any] = [["T", 0, 1], ["T", 1, 1]]
    assert sent_records(request(CODE.SEND_RECORDS, {"runs": runs}, body)) == Cost(2, len(body))
    claimed = request(CODE.SEND_RECORDS, {"runs": [["T", 0, 1 << 60], 7, ["T", 0, "9"]]}, body)
    assert sent_records(claimed).messages == len(body) // 91, "no more than its bytes can hold"
    assert sent_records(request(CODE.SEND_RECORDS, {}, b"")) == Cost(0, 0)


def test_a_follower_refuses_sends_with_the_leader_not_by_quota(
    topic: Broker, group: FakeGroup
) -> None:
    put(topic, QuotaConfig("client", "", sent_messages_per_s=1))
    connection = FakeConnection()
    for _ in range(5):
        send(topic, connection)
    group.step_down()
    answer = send(topic, connection)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert answer.ext[OUTCOME_FIELD] == "not_stored"


# ------------------------------------------------------------------------------ names


def test_an_account_counts_under_its_name_on_all_connections(topic: Broker) -> None:
    put(topic, QuotaConfig("account", "orders", sent_messages_per_s=1))
    one, two = FakeConnection(), FakeConnection(("10.9.9.9", 1))
    of_account("orders", one)
    of_account("orders", two)
    assert [send(topic, each).code for each in (one, two, one)] == [0, 0, ResponseCode.SYSTEM_BUSY]
    other = FakeConnection()
    of_account("billing", other)
    assert [send(topic, other).code for _ in range(5)] == [0] * 5
    assert listed(topic)[0].refused == 1


def test_a_default_counts_each_account_on_its_own(topic: Broker) -> None:
    put(
        topic,
        QuotaConfig("account", "", sent_messages_per_s=1),
        QuotaConfig("account", "free", sent_messages_per_s=None),
    )
    orders, billing, free = FakeConnection(), FakeConnection(), FakeConnection()
    of_account("orders", orders)
    of_account("billing", billing)
    of_account("free", free)
    for connection in (orders, billing):
        codes = [send(topic, connection).code for _ in range(3)]
        assert codes == [0, 0, ResponseCode.SYSTEM_BUSY]
    assert [send(topic, free).code for _ in range(9)] == [0] * 9, "a quota without limits"


def test_a_default_lists_what_all_without_their_own_did(topic: Broker) -> None:
    put(
        topic,
        QuotaConfig("account", "", sent_messages_per_s=1, connections=5),
        QuotaConfig("account", "orders", sent_messages_per_s=1, connections=5),
        QuotaConfig("client", "", sent_messages_per_s=1),
    )
    for name, times in (("orders", 7), ("billing", 4), ("stock", 3)):
        connection = FakeConnection()
        of_account(name, connection)
        for _ in range(times):
            send(topic, connection)
    found = {(row.kind, row.name): (row.refused, row.open_connections) for row in listed(topic)}
    assert found == {("account", ""): (3, 2), ("account", "orders"): (5, 1), ("client", ""): (0, 0)}
    held_ms = {(row.kind, row.name): row.throttled_ms for row in listed(topic)}
    assert held_ms["account", ""] > 0
    assert held_ms["client", ""] == 0


def test_an_administrator_has_a_quota_only_by_name(topic: Broker) -> None:
    put(topic, QuotaConfig("account", "", sent_messages_per_s=1))
    operator = FakeConnection()
    of_account("operator", operator, is_admin=True)
    assert [send(topic, operator).code for _ in range(5)] == [0] * 5
    put(topic, QuotaConfig("account", "operator", sent_messages_per_s=1))
    assert send(topic, operator).code == 0
    assert send(topic, operator).code == 0
    assert send(topic, operator).code == ResponseCode.SYSTEM_BUSY


def test_a_client_is_found_by_id_then_address_then_default(topic: Broker) -> None:
    put(
        topic,
        QuotaConfig("client", "", sent_messages_per_s=1),
        QuotaConfig("client", "10.0.0.5", sent_messages_per_s=2),
        QuotaConfig("client", "10.0.0.5@7", sent_messages_per_s=3),
    )
    passed = {}
    for client_id, host in (
        ("10.0.0.5@7", "10.0.0.5"),
        ("10.0.0.5@8", "10.0.0.5"),
        ("10.0.0.5@9", "10.0.0.5"),
        ("any@1", "10.0.0.6"),
        ("any@2", "10.0.0.6"),
    ):
        connection = FakeConnection((host, 1))
        beat(topic, connection, client_id)
        passed[client_id] = sum(send(topic, connection).code == 0 for _ in range(10))
    assert passed == {
        "10.0.0.5@7": 6,
        "10.0.0.5@8": 4,
        "10.0.0.5@9": 0,  # the quota of an address is that of all its clients
        "any@1": 2,
        "any@2": 2,
    }


def test_commands_of_operators_pass_whatever_the_quota(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", 1, 1, 1, 1, 1))
    connection = FakeConnection()
    for _ in range(5):
        send(topic, connection)
    connection.held.clear()
    for code, ext in (
        (CODE.GET_BROKER_RUNTIME_INFO, {}),
        (CODE.GET_ALL_TOPIC_CONFIG, {}),
        (CODE.LIST_QUOTAS, {}),
        (CODE.RAFT_STATUS, {}),
        (CODE.GET_MAX_OFFSET, {"topic": "T", "queueId": "0"}),
    ):
        assert topic.call(code, ext, connection=connection).code == 0
    assert connection.held == []


# ------------------------------------------------------------------------------ receives


async def test_a_pull_after_a_large_answer_is_held(topic: Broker, clock: ManualClock) -> None:
    put(topic, QuotaConfig("client", "", received_messages_per_s=10))
    topic.group.put("T", 0, *(b"m%d" % number for number in range(20)))
    assert len(list(iter_records(bytes(topic.call(CODE.PULL_MESSAGE, PULL).body)))) == 20
    before_s = clock.now_s
    answer = await topic.handle(request(CODE.PULL_MESSAGE, dict(PULL)))
    assert answer.code == 0
    assert clock.now_s - before_s == pytest.approx(1.0)
    assert topic.processors.metering.buckets.figures["client:10.1.2.3"].throttled_s == 1.0


async def test_a_pull_far_above_the_quota_is_refused(topic: Broker, clock: ManualClock) -> None:
    put(topic, QuotaConfig("client", "", received_bytes_per_s=100))
    topic.group.put("T", 0, *(b"m%d" % number for number in range(20)))
    connection = FakeConnection()
    assert topic.call(CODE.PULL_MESSAGE, PULL, connection=connection).code == 0
    refused = topic.call(CODE.PULL_MESSAGE, PULL, connection=connection)
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert refused.ext[RETRIABLE_FIELD] == "true"
    assert connection.held == [RECEIVE_DELAY_MAX_S]
    clock.now_s += RECEIVE_DELAY_MAX_S + int(refused.ext[RETRY_AFTER_FIELD]) / 1000
    answer = await topic.handle(request(CODE.PULL_MESSAGE, dict(PULL)), connection)
    assert answer.code == 0, "when its time is over it passes"


async def test_a_held_pull_acts_for_its_own_account(topic: Broker) -> None:
    """Another request comes over the connection while it waits."""
    put(topic, QuotaConfig("account", "", received_messages_per_s=1))
    topic.group.put("T", 0, b"a", b"b")
    connection = FakeConnection()
    of_account("orders", connection)
    assert topic.call(CODE.PULL_MESSAGE, PULL, connection=connection).code == 0
    held = topic.handle(request(CODE.PULL_MESSAGE, dict(PULL)), connection)
    of_account("billing", connection)
    assert (await held).code == 0
    assert admitted_account(connection) == "orders"  # type: ignore[arg-type]  # a fake


def test_what_pop_gives_is_counted(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", received_messages_per_s=5))
    topic.group.put("T", 0, *(b"m%d" % number for number in range(20)))
    connection = FakeConnection()
    assert topic.handle(request(CODE.POP_MESSAGE, dict(POP)), connection) is DEFERRED
    topic.group.settle()
    assert connection.replies[-1][1].code == 0
    refused = topic.call(CODE.POP_MESSAGE, POP, connection=connection)
    assert refused.code == ResponseCode.SYSTEM_BUSY


def test_an_answer_without_messages_costs_nothing() -> None:
    asked = request(CODE.PULL_MESSAGE)
    assert given(response_to(asked, ResponseCode.PULL_NOT_FOUND, None, {}, b"x" * 200)) == (0, 0)
    assert given(response_to(asked)) == Cost(0, 0)
    record = encode_record(topic="T", queue_id=0, body=b"hello", properties=b"")
    assert given(response_to(asked, 0, None, {}, record * 3)) == Cost(3, 3 * len(record))


# ------------------------------------------------------------------------------ connections


def test_a_connection_too_many_is_closed_with_a_reason(topic: Broker) -> None:
    put(topic, QuotaConfig("account", "orders", connections=2))
    connections = [FakeConnection((f"10.0.0.{number}", 1)) for number in range(3)]
    for connection in connections:
        of_account("orders", connection)
    answers = [send(topic, each) for each in (*connections[:2], *connections)]
    assert [answer.code for answer in answers] == [0, 0, 0, 0, ResponseCode.SYSTEM_BUSY]
    refused = answers[-1]
    assert refused.ext["goAway"] == "true"
    assert refused.ext[RETRY_AFTER_FIELD] == str(CONNECT_AGAIN_MS)
    assert [each.leaves for each in connections] == [
        "",
        "",
        "above its quota of connections: account orders has all its connections, 2",
    ]
    assert listed(topic)[0].open_connections == 2
    connections[0].close()
    again = FakeConnection()
    of_account("orders", again)
    assert beat(topic, again, "c1").code == 0, "a heartbeat counts it"
    assert listed(topic)[0].open_connections == 2
    for connection in (connections[1], again):
        connection.close()
    assert listed(topic)[0].open_connections == 0


def test_a_connection_counts_under_the_name_it_has_now(topic: Broker) -> None:
    put(topic, QuotaConfig("client", "", connections=1))
    buckets = topic.processors.metering.buckets
    connection = FakeConnection(("10.0.0.1", 1))
    assert send(topic, connection).code == 0
    assert dict(buckets.connections) == {"client:10.0.0.1": 1}
    beat(topic, connection, "c1")
    assert send(topic, connection).code == 0
    assert dict(buckets.connections) == {"client:c1": 1}
    put(topic, QuotaConfig("client", "", sent_messages_per_s=100))
    assert send(topic, connection).code == 0
    assert dict(buckets.connections) == {}, "there is no limit of them any more"
    put(topic, QuotaConfig("client", "", connections=1))
    assert send(topic, connection).code == 0
    connection.close()
    assert dict(buckets.connections) == {}


def test_accounts_in_turn_on_one_connection_leave_nothing(topic: Broker) -> None:
    """A proxy sends for one account that has a limit of connections and one that has none."""
    put(
        topic,
        QuotaConfig("account", "few", connections=9),
        QuotaConfig("account", "fast", sent_messages_per_s=1000),
    )
    connection = FakeConnection()
    for account in ("few", "fast") * 3:
        of_account(account, connection)
        assert send(topic, connection).code == 0
    assert len(connection.on_close) == 1
    of_account("few", connection)
    assert send(topic, connection).code == 0
    connection.close()
    assert dict(topic.processors.metering.buckets.connections) == {}


def test_a_leader_is_named_in_no_refusal_by_quota(topic: Broker) -> None:
    """It must not be taken for another leader's address."""
    put(topic, QuotaConfig("client", "", sent_messages_per_s=1))
    connection = FakeConnection()
    refused = [send(topic, connection) for _ in range(3)][-1]
    assert LEADER not in refused.ext.values()
