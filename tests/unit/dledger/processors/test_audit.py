"""Each administrative act has one audit line with account, subject and outcome; never a secret."""

import json
import re
from collections.abc import Awaitable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing
import trio
import trio.testing

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import MQError
from dledger.namesrv.server import LOCAL_ADMIN
from dledger.processors.access import AccessProcessor
from dledger.processors.admin import BrokerConfigProcessor, LiveSettings
from dledger.processors.answers import refusal
from dledger.processors.handles import Limit, codes_of, handlers_of
from dledger.processors.operator_offsets import RESETS_NOTED_MAX, is_of_operator, note_refused_reset
from dledger.processors.raft import MembershipChanges, RaftChangeProcessor
from dledger.processors.wiring import PROCESSORS
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.audit import MAX_SUBJECT_CHARACTERS, subject_text
from dledger.remoting.access.gate import AccessGate
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import Handler
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    DataVersion,
    HeartbeatData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import BY_OPERATOR_FIELD
from dledger.remoting.protocol.signature import ACCESS_KEY
from dledger.state.state_record import ConsumerOffsetsChange
from dledger.testing.doubles import ManualClock
from tests.harness.beside import beside
from tests.harness.broker import Broker, later, topic_fields
from tests.harness.fake_group import FakeConnection, FakeGroup

CODE = RequestCode
SECRET = "hunter2-hunter2"
PAGE = (Path(__file__).parents[4] / "docs" / "operate" / "access.md").read_text()
LIMITERS = {limit: Limiter(limit.value, 10) for limit in Limit}

Lines = list[dict[str, Any]]


@pytest.fixture
def live() -> LiveSettings:
    """Takes every setting."""
    taken = SimpleNamespace(update=lambda *_, **__: [], version=DataVersion())
    return cast("LiveSettings", taken)


@pytest.fixture
def lines() -> Iterator[Lines]:
    with structlog.testing.capture_logs() as logged:
        yield cast("Lines", logged)


def audits(lines: Lines) -> Lines:
    return [line for line in lines if line["event"] == "audit"]


def acts(lines: Lines) -> list[tuple[str, str, str]]:
    return [(line["request"], line["subject"], line["outcome"]) for line in audits(lines)]


TOPIC = topic_fields(2, topic="orders")


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


MODE = {"topic": "T", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0}

ACTS: list[tuple[RequestCode, dict[str, str], bytes, str]] = [
    (CODE.UPDATE_AND_CREATE_TOPIC, TOPIC, b"", "topic=orders"),
    (
        CODE.UPDATE_AND_CREATE_TOPIC_LIST,
        {},
        as_json({"topicConfigList": [{"topicName": "A"}, {"topicName": "B"}]}),
        "topics=A,B",
    ),
    (CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T"}, b"", "topic=T"),
    (
        CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        {},
        as_json({"groupName": "billing"}),
        "group=billing",
    ),
    (
        CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        {},
        as_json({"groupConfigList": [{"groupName": "a"}, {"groupName": "b"}]}),
        "groups=a,b",
    ),
    (CODE.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "cleanOffset": "true"}, b"", "groupName=g"),
    (
        CODE.CLONE_GROUP_OFFSET,
        {"srcGroup": "g", "destGroup": "h", "topic": "T"},
        b"",
        "topic=T srcGroup=g destGroup=h",
    ),
    (CODE.SET_MESSAGE_REQUEST_MODE, {}, as_json(MODE), "topic=T group=g"),
    (CODE.DELETE_EXPIRED_COMMITLOG, {}, b"", ""),
    (CODE.CLEAN_UNUSED_TOPIC, {}, b"", ""),
    (CODE.CLEAN_EXPIRED_CONSUMEQUEUE, {}, b"", ""),
]


@pytest.mark.parametrize(("code", "ext", "body", "subject"), ACTS, ids=lambda v: str(v)[:40])
def test_an_act_has_one_line_when_it_is_done(
    broker: Broker, lines: Lines, code: RequestCode, ext: dict[str, str], body: bytes, subject: str
) -> None:
    broker.make_topic("T", 1)
    broker.make_group("g")
    assert broker.call(code, ext, body).code == 0
    assert audits(lines) == [
        {
            "event": "audit",
            "log_level": "info",
            "account": "anonymous",
            "address": "10.1.2.3:4567",
            "request": code.name,
            "subject": subject,
            "outcome": "done",
            "code": 0,
        }
    ]


def test_a_reset_has_a_line_with_consumers_and_without(broker: Broker, lines: Lines) -> None:
    broker.make_topic("T", 1)
    broker.group.store(ConsumerOffsetsChange.of((("g", "T", 0, 0),)))
    reset = {"topic": "T", "group": "g", "timestamp": "0", "isForce": "true"}
    assert broker.call(CODE.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 206
    consumer = ConsumerData("g", subscription_data_set=[SubscriptionData(topic="T")])
    body = HeartbeatData(client_id="c", consumer_data_set=[consumer]).encode()
    assert broker.call(CODE.HEART_BEAT, {}, body).code == 0
    broker.group.settle()
    assert broker.call(CODE.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 0
    assert acts(lines) == [
        ("INVOKE_BROKER_TO_RESET_OFFSET", "topic=T group=g", "not_stored"),
        ("INVOKE_BROKER_TO_RESET_OFFSET", "topic=T group=g", "done"),
    ]


COMMIT = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "7"}
LINE_OF_COMMIT = (
    "UPDATE_CONSUMER_OFFSET",
    "topic=T consumerGroup=g queueId=0 commitOffset=7",
    "done",
)


def test_a_commit_of_an_operator_has_a_line(broker: Broker, lines: Lines) -> None:
    broker.make_topic("T", 1)
    broker.make_group("g")
    marked = {**COMMIT, BY_OPERATOR_FIELD: "true"}
    assert broker.call(CODE.UPDATE_CONSUMER_OFFSET, marked).code == 0
    assert broker.call(CODE.UPDATE_CONSUMER_OFFSET, {**marked, "queueId": "9"}).code != 0
    assert acts(lines) == [
        LINE_OF_COMMIT,
        (
            "UPDATE_CONSUMER_OFFSET",
            "topic=T consumerGroup=g queueId=9 commitOffset=7",
            "not_stored",
        ),
    ]


def test_commits_after_a_refused_reset_have_lines(broker: Broker, lines: Lines) -> None:
    """RocketMQ's tools store offsets so where no consumer is connected."""
    broker.make_topic("T", 1)
    broker.make_topic("U", 1)
    broker.make_group("g")
    assert broker.call(CODE.UPDATE_CONSUMER_OFFSET, COMMIT).code == 0
    reset = {"topic": "T", "group": "g", "timestamp": "0", "isForce": "true"}
    assert broker.call(CODE.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 206
    for other in ({"topic": "U"}, {"consumerGroup": "h"}, {}):
        assert broker.call(CODE.UPDATE_CONSUMER_OFFSET, {**COMMIT, **other}).code == 0
    assert acts(lines) == [
        ("INVOKE_BROKER_TO_RESET_OFFSET", "topic=T group=g", "not_stored"),
        LINE_OF_COMMIT,
    ]


def test_refused_resets_of_a_connection_are_bounded() -> None:
    connection = cast("Connection", FakeConnection())
    for number in range(RESETS_NOTED_MAX + 1):
        note_refused_reset(connection, "g", f"T{number}")

    def counts(number: int) -> bool:
        ext = {**COMMIT, "topic": f"T{number}"}
        return is_of_operator(connection, request(CODE.UPDATE_CONSUMER_OFFSET, ext))

    assert [counts(0), counts(1), counts(RESETS_NOTED_MAX)] == [False, True, True]


def test_a_refused_act_has_a_line_with_its_outcome(broker: Broker, lines: Lines) -> None:
    assert broker.call(CODE.DELETE_TOPIC_IN_BROKER, {"topic": " "}).code != 0
    assert broker.call(CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, b"no json").code != 0
    assert acts(lines) == [
        ("DELETE_TOPIC_IN_BROKER", "topic= ", "not_stored"),
        ("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", "", "not_stored"),
    ]


# ----------------------------------------------------------------------- accounts and secrets


ACCOUNTS = f"""\
[accounts.operator]
secret_key = "{SECRET}"
admin = true
white_address = "10.1.2.3"
[accounts.producer]
secret_key = "{SECRET}"
white_address = "10.1.2.3"
"""


@pytest.fixture
def accounts(tmp_path: Path) -> AccountStore:
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNTS)
    return AccountStore(OsDisk(), str(path))


def through(gate: AccessGate, broker: Broker, code: RequestCode, ext: dict[str, str]) -> None:
    handler, _ = broker.processors.handlers[code]
    connection = cast("Connection", broker.connection)
    gate.guard(code, handler)(connection, request(code, ext))
    broker.group.settle()


def test_the_account_of_a_line_is_the_admitted_one(
    broker: Broker, accounts: AccountStore, clock: ManualClock, lines: Lines
) -> None:
    gate = AccessGate(accounts, {}, clock, cast("Any", None))
    broker.make_topic("T", 1)
    through(gate, broker, CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T", ACCESS_KEY: "operator"})
    assert [(line["account"], line["subject"]) for line in audits(lines)] == [
        ("operator", "topic=T")
    ]


def test_a_request_kept_out_is_no_act(
    broker: Broker, accounts: AccountStore, clock: ManualClock, lines: Lines
) -> None:
    gate = AccessGate(accounts, {}, clock, cast("Any", None))
    with pytest.raises(Exception, match="Need admin permission"):
        through(gate, broker, CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T", ACCESS_KEY: "producer"})
    assert audits(lines) == []
    assert [line["event"] for line in lines if line["event"] == "access_refused"] != []


def test_a_name_that_nothing_proved_is_in_no_line(broker: Broker, lines: Lines) -> None:
    broker.make_topic("T", 1)
    broker.call(CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T", ACCESS_KEY: "operator"})
    assert [line["account"] for line in audits(lines)] == ["anonymous"]


def test_changed_accounts_are_named_without_secrets(
    accounts: AccountStore, tmp_path: Path, lines: Lines
) -> None:
    path = tmp_path / "accounts.toml"
    text = ACCOUNTS.replace("[accounts.producer]", "[accounts.newcomer]")
    path.write_text(text.replace(SECRET, SECRET + SECRET, 1))
    accounts.take(accounts._changed())
    (line,) = (line for line in lines if line["event"] == "accounts_read")
    assert (line["added"], line["changed"], line["removed"]) == (
        ["newcomer"],
        ["operator"],
        ["producer"],
    )
    assert SECRET not in str(lines)


async def call(
    handlers: dict[RequestCode, tuple[Handler, Limiter]],
    code: RequestCode,
    ext: dict[str, str],
    body: bytes,
) -> None:
    connection, command = FakeConnection(), request(code, ext, body)
    try:
        handled = handlers[code][0](cast("Connection", connection), command)
    except MQError as error:
        handled = refusal(command, error)
    if isinstance(handled, RemotingCommand):
        connection.answered(command, handled)
    elif isinstance(handled, Awaitable):
        await later(connection, command, handled)


async def test_secret_is_in_no_audit_line(broker: Broker, live: LiveSettings, lines: Lines) -> None:
    """In the signature, in unknown fields, in the body, in the value of a setting."""
    access = AccessProcessor(broker.group, broker.settings, lambda _: False, cast("Any", None))
    others = [BrokerConfigProcessor(live), access, raft(Changes())]
    handlers = broker.processors.handlers | handlers_of(others, LIMITERS, broker.group)
    fields = {"Signature": SECRET, "SecurityToken": SECRET, "password": SECRET, "secretKey": SECRET}
    fields[BY_OPERATOR_FIELD] = "true"
    user = {"username": "u", "password": SECRET, "groupName": "g"}
    codes = codes_of(PROCESSORS, attrgetter("is_administrative"))
    for code in codes:
        for body in (as_json(user), f"brokerName={SECRET}\nmessageDelayLevel={SECRET}\n".encode()):
            await call(handlers, code, {**fields, "topic": "T"}, body)
    broker.group.settle()
    assert {line["request"] for line in audits(lines)} == {code.name for code in codes}
    assert SECRET not in str(audits(lines))


async def test_live_settings_are_named_without_their_values(
    broker: Broker, live: LiveSettings, lines: Lines
) -> None:
    handlers = handlers_of([BrokerConfigProcessor(live)], LIMITERS, broker.group)
    await call(
        handlers, CODE.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=96\nbrokerPermission=4\n"
    )
    assert acts(lines) == [
        ("UPDATE_BROKER_CONFIG", "settings=fileReservedTime,brokerPermission", "done")
    ]


# ------------------------------------------------------------------------------ members


class Changes:
    """Carries out what it is asked for, when *let* is set; fails with *error* if there is one."""

    def __init__(self, error: Exception | None = None, let: trio.Event | None = None) -> None:
        self.error = error
        self.let = let

    async def _do(self, *_: Any) -> None:
        if self.let is not None:
            await self.let.wait()
        if self.error is not None:
            raise self.error

    add = replace = remove = transfer = _do


def raft(changes: Changes) -> RaftChangeProcessor:
    return RaftChangeProcessor(cast("MembershipChanges", changes))


async def change(group: FakeGroup, changes: Changes, **ext: str) -> None:
    handler, _ = handlers_of([raft(changes)], LIMITERS, group)[CODE.RAFT_CHANGE]
    connection, command = FakeConnection(), request(CODE.RAFT_CHANGE, dict(ext))
    await later(connection, command, cast("Any", handler(cast("Connection", connection), command)))


async def test_a_change_of_members_names_member_and_address(group: FakeGroup, lines: Lines) -> None:
    await change(group, Changes(), op="add", name="n3", address="h:1")
    await change(group, Changes(), op="transfer", name="n1")
    await change(group, Changes(ChangeRefusedError("no")), op="remove", name="n2")
    assert acts(lines) == [
        ("RAFT_CHANGE", "op=add name=n3 address=h:1", "done"),
        ("RAFT_CHANGE", "op=transfer name=n1", "done"),
        ("RAFT_CHANGE", "op=remove name=n2", "not_stored"),
    ]


async def test_a_change_nothing_waits_for_is_unknown(group: FakeGroup, lines: Lines) -> None:
    async with beside(lambda: change(group, Changes(let=trio.Event()), op="remove", name="n2")):
        await trio.testing.wait_all_tasks_blocked()
    assert acts(lines) == [("RAFT_CHANGE", "op=remove name=n2", "unknown")]


# ------------------------------------------------------------------------------ what is an act


CLIENTS = {
    # sending
    CODE.SEND_MESSAGE,
    CODE.SEND_MESSAGE_V2,
    CODE.SEND_BATCH_MESSAGE,
    CODE.SEND_RECORDS,
    CODE.SEND_REPLY_MESSAGE,
    CODE.SEND_REPLY_MESSAGE_V2,
    CODE.OPEN_PRODUCER,
    CODE.END_TRANSACTION,
    CODE.RECALL_MESSAGE,
    # consuming
    CODE.PULL_MESSAGE,
    CODE.LITE_PULL_MESSAGE,
    CODE.BULK_PULL,
    CODE.CONSUME_STEP,
    CODE.CONSUMER_SEND_MSG_BACK,
    CODE.POP_MESSAGE,
    CODE.ACK_MESSAGE,
    CODE.BATCH_ACK_MESSAGE,
    CODE.CHANGE_MESSAGE_INVISIBLETIME,
    CODE.NOTIFICATION,
    CODE.LOCK_BATCH_MQ,
    CODE.UNLOCK_BATCH_MQ,
    CODE.HEART_BEAT,
    CODE.UNREGISTER_CLIENT,
}
"""What programs send while they work: it changes state, and is no administrative act."""

LOOKS = re.compile(
    r"(AUTH_)?(GET|LIST|QUERY|VIEW|SEARCH|CHECK)_|RAFT_STATUS|CAPABILITIES|POLLING_INFO"
    r"|INVOKE_BROKER_TO_GET_CONSUMER_STATUS"
)
"""Names of requests that change nothing."""


def test_every_request_is_an_act_or_known_to_be_none() -> None:
    """A new request has a line, or a place in `CLIENTS`, or a name that shows what it is."""
    codes = codes_of(PROCESSORS)
    looks = {code for code in codes if LOOKS.match(code.name)}
    administrative = codes_of(PROCESSORS, attrgetter("is_administrative"))
    assert not CLIENTS & administrative
    assert not looks & administrative
    assert codes - looks - CLIENTS == administrative


def section_of_acts(name: str) -> set[str]:
    section = PAGE.split("## Audit log\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    of_name_server = [line for line in lines if "of a NameServer" in line.split("|")[1]]
    chosen = of_name_server if name == "namesrv" else [x for x in lines if x not in of_name_server]
    return set(re.findall(r"`([A-Z][A-Z_]{4,})`", "\n".join(chosen)))


def test_the_access_page_names_every_act() -> None:
    assert section_of_acts("broker") == {
        code.name for code in codes_of(PROCESSORS, attrgetter("is_administrative"))
    }
    assert section_of_acts("namesrv") == {code.name for code in LOCAL_ADMIN}


def test_a_long_subject_is_cut() -> None:
    text = subject_text({"topics": ",".join(f"topic-{number}" for number in range(1_000))})
    assert (len(text), text[:14], text[-1]) == (MAX_SUBJECT_CHARACTERS, "topics=topic-0", "…")
