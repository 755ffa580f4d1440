"""Every request code of a broker has a rule, and each asks for the right that it should."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import ENTRY_HEADER_BYTES
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC, encode_properties
from dledger.processors.access import AccessProcessor
from dledger.processors.admin import BrokerConfigProcessor
from dledger.processors.handles import (
    Limit,
    declared,
    handlers_of,
    handles,
    message_at,
    needs,
    topic_of_message_at,
)
from dledger.processors.raft import RaftChangeProcessor
from dledger.processors.wiring import PROCESSORS, broker_rules
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import ADMIN, SIGNED, Account, Permission, Right, topic_right
from dledger.remoting.access.gate import AccessGate
from dledger.remoting.access.policies import Policies, parse_entry
from dledger.remoting.connection import Connection
from dledger.remoting.errors import AccessRefusedError, BadRequestError
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS, HALF_TOPIC, TRACE_TOPIC
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.present import present

PUB, SUB = Permission.PUB, Permission.SUB
CODE = RequestCode
RECORD_SIZE_BYTES = 4


def topic(name: str, permission: Permission, *, by_line: bool = False) -> Right:
    return Right(name, permission, by_line=by_line)


def group(name: str) -> Right:
    return Right(name, SUB, is_group=True)


MESSAGES = {100: "T", 200: "%RETRY%g", 300: "SCHEDULE_TOPIC_XXXX"}
RULES = broker_rules(MESSAGES.get, "Default")


def rights(code: int, ext: dict[str, Any] | None = None, body: object = None) -> list[Right]:
    rule = RULES[code]
    assert rule.rights is not None
    encoded = b"" if body is None else msgspec.json.encode(body)
    return list(rule.rights(request(code, ext, encoded)))


def test_rules_name_each_code_once() -> None:
    codes = [code for _, declaration in declared(PROCESSORS) for code in declaration.codes]
    assert sorted(codes) == sorted(set(codes))
    assert set(codes) == set(RULES)


def test_rules_are_those_of_the_codes_with_a_handler(broker: Broker) -> None:
    """What the daemon registers beside its processors is listed here."""
    beside = [AccessProcessor, BrokerConfigProcessor, RaftChangeProcessor]
    by_daemon = {code for _, declaration in declared(beside) for code in declaration.codes}
    assert {
        CODE(code).name for code in {*broker.processors.handlers, *by_daemon} ^ set(RULES)
    } == set()


def test_no_code_at_all_passes_unsigned(tmp_path: Path, clock: ManualClock) -> None:
    accounts = tmp_path / "accounts.toml"
    accounts.write_text('[accounts.operator]\nsecret_key = "0123456789"\nadmin = true\n')
    gate = AccessGate(AccountStore(OsDisk(), str(accounts)), RULES, clock, Random(1))
    table = ProcessorTable(gate.guard)
    reached: list[int] = []
    for code in CODE:
        table.register(code, lambda _, asked: reached.append(asked.code), Limiter("test", 1))
    stranger: Any = SimpleNamespace(peer_address=("10.0.0.1", 1))
    for number in table.codes():
        processor = present(table.get(number))
        with pytest.raises(AccessRefusedError, match="No accessKey is configured"):
            processor.handler(stranger, request(number, {"topic": "T", "b": "T"}))
    assert reached == []
    assert table.codes() == frozenset(CODE)


def test_rights_keep_cluster_changes_for_administrators() -> None:
    """The whole list, so that none leaves it unnoticed."""
    found = {CODE(code).name for code, rule in RULES.items() if rule.admin}
    assert found == {
        *("UPDATE_AND_CREATE_TOPIC", "UPDATE_AND_CREATE_TOPIC_LIST", "DELETE_TOPIC_IN_BROKER"),
        *("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST"),
        *("DELETE_SUBSCRIPTIONGROUP", "UPDATE_BROKER_CONFIG", "GET_BROKER_CONFIG"),
        *("CLEAN_EXPIRED_CONSUMEQUEUE", "CLEAN_UNUSED_TOPIC", "DELETE_EXPIRED_COMMITLOG"),
        *("CLONE_GROUP_OFFSET", "CONSUME_MESSAGE_DIRECTLY", "GET_ALL_CONSUMER_OFFSET"),
        *("GET_ALL_DELAY_OFFSET", "UPDATE_AND_CREATE_ACL_CONFIG", "DELETE_ACL_CONFIG"),
        *("GET_BROKER_CLUSTER_ACL_INFO", "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG"),
        *("GET_BROKER_CLUSTER_ACL_CONFIG", "AUTH_CREATE_USER", "AUTH_UPDATE_USER"),
        *("AUTH_DELETE_USER", "AUTH_GET_USER", "AUTH_LIST_USER", "AUTH_CREATE_ACL"),
        *("AUTH_UPDATE_ACL", "AUTH_DELETE_ACL", "AUTH_GET_ACL", "AUTH_LIST_ACL", "RAFT_CHANGE"),
        *("SET_MESSAGE_REQUEST_MODE", "GET_ALL_MESSAGE_REQUEST_MODE"),
    }


WITH_RIGHTS: dict[RequestCode, tuple[dict[str, Any], object, list[Right]]] = {
    CODE.SEND_MESSAGE: ({"topic": "T"}, None, [topic("T", PUB)]),
    CODE.SEND_MESSAGE_V2: ({"b": "T", "topic": "other"}, None, [topic("T", PUB)]),
    CODE.SEND_BATCH_MESSAGE: ({"b": "T"}, None, [topic("T", PUB)]),
    CODE.SEND_REPLY_MESSAGE: ({"topic": "T"}, None, [topic("T", PUB)]),
    CODE.SEND_REPLY_MESSAGE_V2: ({"b": "Default_REPLY_TOPIC"}, None, []),
    CODE.SEND_RECORDS: ({"runs": [["T", 0, 1], ["T", 1, 1]]}, None, [topic("T", PUB)]),
    CODE.CONSUME_STEP: (
        {
            "runs": [["T", 0, 1], ["T", 1, 1]],
            "consumer_group": "g",
            "commits": [["U", 0, 0, 1], ["U", 1, 0, 1]],
        },
        None,
        [topic("T", PUB), group("g"), topic("U", SUB)],
    ),
    CODE.RECALL_MESSAGE: ({"topic": "T"}, None, [topic("T", PUB)]),
    CODE.LITE_PULL_MESSAGE: (
        {"topic": "%RETRY%g", "consumerGroup": "g"},
        None,
        [group("g"), group("g")],
    ),
    CODE.BULK_PULL: (
        {"topic": "SCHEDULE_TOPIC_XXXX", "consumerGroup": "g"},
        None,
        [topic("SCHEDULE_TOPIC_XXXX", SUB, by_line=True), group("g")],
    ),
    **dict.fromkeys(
        (
            CODE.SEARCH_OFFSET_BY_TIMESTAMP,
            CODE.GET_MAX_OFFSET,
            CODE.GET_MIN_OFFSET,
            CODE.GET_EARLIEST_MSG_STORETIME,
        ),
        ({"topic": "T"}, None, [topic("T", PUB | SUB)]),
    ),
    CODE.QUERY_MESSAGE: ({"topic": "T"}, None, [topic("T", SUB)]),
    **dict.fromkeys(
        (CODE.INVOKE_BROKER_TO_RESET_OFFSET, CODE.INVOKE_BROKER_TO_GET_CONSUMER_STATUS),
        ({"topic": "T", "group": "g"}, None, [topic("T", SUB), group("g")]),
    ),
    CODE.GET_CONSUMER_LIST_BY_GROUP: ({"consumerGroup": "g"}, None, [group("g")]),
    CODE.GET_CONSUMER_RUNNING_INFO: ({"consumerGroup": "g"}, None, [group("g")]),
    CODE.HEART_BEAT: (
        {},
        {
            "clientID": "c",
            "producerDataSet": [{"groupName": "p"}],
            "consumerDataSet": [
                {"groupName": "g", "subscriptionDataSet": [{"topic": "T"}, {"topic": "%RETRY%g"}]}
            ],
        },
        [group("g"), topic("T", SUB), group("g")],
    ),
    CODE.UNREGISTER_CLIENT: ({"clientID": "c", "consumerGroup": "g"}, None, [group("g")]),
    CODE.LOCK_BATCH_MQ: ({}, {"consumerGroup": "g", "clientId": "c", "mqSet": []}, [group("g")]),
    CODE.UNLOCK_BATCH_MQ: ({}, {"consumerGroup": "g", "clientId": "c", "mqSet": []}, [group("g")]),
    CODE.VIEW_MESSAGE_BY_ID: ({"offset": "100", "topic": "mine"}, None, [topic("T", SUB)]),
    CODE.CONSUMER_SEND_MSG_BACK: (
        {"offset": "100", "group": "g", "originTopic": "mine"},
        None,
        [group("g"), topic("T", SUB)],
    ),
    **{
        code: ({"topic": "T", "consumerGroup": "g"}, None, [topic("T", SUB), group("g")])
        for code in (
            CODE.PULL_MESSAGE,
            CODE.QUERY_CONSUMER_OFFSET,
            CODE.UPDATE_CONSUMER_OFFSET,
            CODE.POP_MESSAGE,
            CODE.ACK_MESSAGE,
            CODE.CHANGE_MESSAGE_INVISIBLETIME,
            CODE.NOTIFICATION,
            CODE.POLLING_INFO,
        )
    },
    CODE.BATCH_ACK_MESSAGE: (
        {},
        {"acks": [{"c": "g", "t": "T"}, {"c": "g", "t": "SCHEDULE_TOPIC_XXXX"}]},
        [topic("T", SUB), group("g"), topic("SCHEDULE_TOPIC_XXXX", SUB, by_line=True), group("g")],
    ),
    CODE.QUERY_ASSIGNMENT: (
        {},
        {"topic": "T", "consumerGroup": "g"},
        [topic("T", SUB), group("g")],
    ),
    CODE.END_TRANSACTION: ({"commitLogOffset": "100"}, None, [topic("T", PUB)]),
}


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if rule.rights is not None])
def test_each_rule_asks_for_what_the_request_is_about(code: int) -> None:
    ext, body, expected = WITH_RIGHTS[CODE(code)]
    assert rights(code, ext, body) == expected


def test_no_code_has_lost_the_rights_it_asked_for() -> None:
    """Above stands every code that must ask for a right; one that asks no more is missing here."""
    asking = {CODE(code) for code, rule in RULES.items() if rule.rights is not None}
    assert {code.name for code in WITH_RIGHTS} == {code.name for code in asking}


def test_all_other_codes_need_a_signature_only() -> None:
    others = {code for code, rule in RULES.items() if rule.rights is None and not rule.admin}
    assert others == {code for code, rule in RULES.items() if rule is SIGNED}
    assert CODE.CAPABILITIES in others


def test_rights_let_all_write_traces_and_some_read() -> None:
    assert rights(CODE.SEND_MESSAGE, {"topic": "RMQ_SYS_TRACE_TOPIC"}) == []
    pull = {"topic": "RMQ_SYS_TRACE_TOPIC", "consumerGroup": "g"}
    assert topic("RMQ_SYS_TRACE_TOPIC", SUB, by_line=True) in rights(CODE.PULL_MESSAGE, pull)


def test_producers_say_goodbye_without_a_group() -> None:
    assert rights(CODE.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "p"}) == []


def test_a_message_that_is_not_there_needs_no_right() -> None:
    """The handler answers that it is not there."""
    assert rights(CODE.VIEW_MESSAGE_BY_ID, {"offset": "101"}) == []


def test_a_message_of_a_retry_topic_belongs_to_its_group() -> None:
    assert rights(CODE.VIEW_MESSAGE_BY_ID, {"offset": "200"}) == [group("g")]
    assert rights(CODE.VIEW_MESSAGE_BY_ID, {"offset": "300"}) == [
        topic("SCHEDULE_TOPIC_XXXX", SUB, by_line=True)
    ]


@pytest.mark.parametrize(
    ("code", "ext"),
    [
        (CODE.SEND_MESSAGE, {}),
        (CODE.SEND_MESSAGE, {"topic": 5}),
        (CODE.SEND_MESSAGE_V2, {"topic": "T"}),
        (CODE.SEND_RECORDS, {"runs": "T"}),
        (CODE.SEND_RECORDS, {"runs": [["T", 0, 1], []]}),
        (CODE.SEND_RECORDS, {"runs": [[7, 0, 1]]}),
        (CODE.CONSUME_STEP, {"runs": [], "consumer_group": "g"}),
        (CODE.CONSUME_STEP, {"runs": [], "commits": [["U", 0, 0, 1]]}),
        (CODE.PULL_MESSAGE, {"topic": "T"}),
        (CODE.PULL_MESSAGE, {"consumerGroup": "g"}),
        (CODE.VIEW_MESSAGE_BY_ID, {"offset": "x"}),
        (CODE.VIEW_MESSAGE_BY_ID, {}),
        (CODE.CONSUMER_SEND_MSG_BACK, {"group": "g", "offset": None}),
        (CODE.END_TRANSACTION, {"commitLogOffset": ["1"]}),
    ],
)
def test_a_request_that_does_not_say_what_it_is_about_is_refused(
    code: int, ext: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError):
        rights(code, ext)


def test_a_heartbeat_that_cannot_be_read_is_refused() -> None:
    rule = present(RULES[CODE.HEART_BEAT].rights)
    with pytest.raises(BadRequestError):
        list(rule(RemotingCommand(CODE.HEART_BEAT, body=b"{")))


def position_of(broker: Broker, topic_name: str, properties: dict[str, str]) -> int:
    """Store one message at once and return where it stands."""
    position = broker.group.log.end_position + ENTRY_HEADER_BYTES + RECORD_SIZE_BYTES
    broker.group.put(topic_name, 0, b"body", properties=encode_properties(properties))
    return position


def test_the_topic_of_a_message_is_where_it_is_or_where_it_goes(broker: Broker) -> None:
    plain = position_of(broker, "T", {})
    later = position_of(broker, SCHEDULE_TOPIC, {"DELAY": "1", "REAL_TOPIC": "U", "REAL_QID": "0"})
    half = position_of(broker, HALF_TOPIC, {"REAL_TOPIC": "V"})
    timed = position_of(broker, TIMER_TOPIC, {"REAL_TOPIC": "W", "TIMER_OUT_MS": "1000"})
    topic_at = topic_of_message_at(broker.group)
    assert [topic_at(each) for each in (plain, later, half, timed)] == ["T", "U", "V", "W"]
    assert [topic_at(position) for position in (plain + 1, -1, 1 << 62)] == [None] * 3


OF_OTHERS = sorted(
    CLOSED_TOPICS
    | {TRACE_TOPIC, "rmq_sys_x", "Rmq_Sys_X", "Default_REPLY_TOPIC", "%RETRY%denied", "%DLQ%denied"}
)
FREE = {
    TRACE_TOPIC: {
        *(CODE.SEND_MESSAGE, CODE.SEND_MESSAGE_V2, CODE.SEND_BATCH_MESSAGE, CODE.SEND_RECORDS)
    },
    "Default_REPLY_TOPIC": {CODE.SEND_REPLY_MESSAGE, CODE.SEND_REPLY_MESSAGE_V2},
}
"""Every account may write there."""


def about(value: Any, topic_name: str) -> Any:
    """Return a request's fields with *topic_name* in place of each topic."""
    if isinstance(value, dict):
        return {
            key: topic_name if key in ("topic", "b", "t") else about(each, topic_name)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [about(each, topic_name) for each in value]
    return topic_name if value in ("T", "U") else value


@pytest.mark.parametrize("name", OF_OTHERS)
def test_defaults_grant_nothing_that_holds_what_is_denied(name: str) -> None:
    """Every topic with messages of others, and every code that names a topic or a message."""
    account = Account(
        "reader-key",
        "0123456789",
        default_topic=PUB | SUB,
        default_group=SUB,
        topics={"T": Permission.DENY},
        groups={"denied": Permission.DENY},
    )
    rules = broker_rules(lambda _: name, "Default")
    granted = set()
    for code, (ext, body, expected) in WITH_RIGHTS.items():
        if not all(right.is_group for right in expected) or "topic" in ext or "b" in ext:
            encoded = msgspec.json.encode(about(body, name))
            found = present(rules[code].rights)
            if all(map(account.allows, found(request(code, about(ext, name), encoded)))):
                granted.add(code)
    assert granted == FREE.get(name, set())


def test_dead_letters_follow_their_line_then_their_group() -> None:
    letters = topic_right("%DLQ%g", SUB)
    secret = "0123456789"
    watching = Account("watcher", secret, topics={"%DLQ%g": SUB})
    assert watching.allows(letters)
    assert not watching.allows(Right("g", SUB, is_group=True))
    assert not watching.allows(topic_right("%DLQ%g", PUB))
    assert Account("consumer", secret, groups={"g": SUB}).allows(letters)
    assert not Account("another", secret, default_topic=PUB | SUB).allows(letters)
    denied = Account("denied-one", secret, groups={"g": SUB}, topics={"%DLQ%g": Permission.DENY})
    assert not denied.allows(letters)
    every = parse_entry("Custom", "Topic:*", ["All"], [], "Allow")
    assert not Account("policies", secret, policies=Policies([every])).allows(letters)


# -- handlers are found by what they declare: code, limit, rule, reads and local


LIMITERS = {limit: Limiter(limit.value, 1) for limit in Limit}


class Example:
    """Declares a handler of each kind."""

    @handles(CODE.SEND_MESSAGE, CODE.SEND_MESSAGE_V2, limit=Limit.SEND, rule=SIGNED, appends=True)
    def send(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.PULL_MESSAGE, limit=Limit.PULL, rule=needs(SUB, topic="topic"), reads=True)
    def pull(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.VIEW_MESSAGE_BY_ID, limit=Limit.CLIENT, rule=message_at("offset", SUB))
    def view(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    @handles(CODE.DELETE_TOPIC_IN_BROKER, limit=Limit.ADMIN, rule=ADMIN, local=True)
    def delete(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)

    def helper(self) -> None:
        """Not declared: no handler."""


class Twin:
    """Declares a code that another handler has."""

    @handles(CODE.SEND_MESSAGE, limit=Limit.SEND, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        return response_to(command)


def test_handlers_of_refuses_a_code_with_two_handlers(group: FakeGroup) -> None:
    with pytest.raises(ConfigError, match="has a handler already"):
        handlers_of([Example(), Twin()], LIMITERS, group)


def test_handlers_of_refuses_reads_while_a_snapshot_is_refilled(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = handlers_of([Example()], LIMITERS, group)
    monkeypatch.setattr(group, "readable", False)
    connection: Any = None
    with pytest.raises(NotLeaderError):
        handlers[CODE.PULL_MESSAGE][0](connection, request(CODE.PULL_MESSAGE))
    assert handlers[CODE.SEND_MESSAGE][0](connection, request(CODE.SEND_MESSAGE)) is not None


def test_handlers_of_applies_before_all_but_sends(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = handlers_of([Example()], LIMITERS, group)
    caught_up: list[int] = []
    monkeypatch.setattr(group, "catch_up", lambda: caught_up.append(1))
    connection: Any = FakeConnection()
    handlers[CODE.SEND_MESSAGE][0](connection, request(CODE.SEND_MESSAGE))
    assert caught_up == []
    for code in (CODE.PULL_MESSAGE, CODE.VIEW_MESSAGE_BY_ID, CODE.DELETE_TOPIC_IN_BROKER):
        handlers[code][0](connection, request(code))
    assert len(caught_up) == 3


def test_sends_of_a_broker_are_these() -> None:
    """Only what reads no message and is answered early may see less than all that is answered."""
    sends = {code for _, found in declared(PROCESSORS) if found.appends for code in found.codes}
    assert {code.name for code in sends} == {
        *("SEND_MESSAGE", "SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE", "SEND_RECORDS", "CONSUME_STEP")
    }


def test_reads_of_a_broker_are_these() -> None:
    """The whole list, so that none leaves it unnoticed."""
    reads = {code for _, found in declared(PROCESSORS) if found.reads for code in found.codes}
    assert {code.name for code in reads} == {
        *("PULL_MESSAGE", "LITE_PULL_MESSAGE", "BULK_PULL", "QUERY_CONSUMER_OFFSET"),
        *("SEARCH_OFFSET_BY_TIMESTAMP", "GET_MAX_OFFSET", "GET_MIN_OFFSET"),
        *("GET_EARLIEST_MSG_STORETIME", "VIEW_MESSAGE_BY_ID", "QUERY_MESSAGE"),
        *("QUERY_CONSUME_QUEUE", "GET_CONSUME_STATS", "GET_BROKER_CONSUME_STATS"),
        *("QUERY_CONSUME_TIME_SPAN", "GET_TOPIC_STATS_INFO", "INVOKE_BROKER_TO_RESET_OFFSET"),
        *("CONSUME_MESSAGE_DIRECTLY", "POP_MESSAGE", "NOTIFICATION"),
    }
