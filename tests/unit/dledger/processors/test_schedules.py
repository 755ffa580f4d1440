"""Requests about schedules: what is stored, answered, refused and shown."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from dledger.processors import schedules
from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.schedule_bodies import (
    ComingInstants,
    ScheduleBody,
    ScheduleInfo,
    ScheduleList,
)
from dledger.services.repeated_messages import SCHEDULE_BYTES_MAX
from dledger.state.schedules import ScheduleConfig
from dledger.state.topics import PERM_READ
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker

CODE = RequestCode
NAME = "nightly"


def put(
    broker: Broker,
    expression: str = "@every 10s",
    *,
    name: str = NAME,
    topic: str = "T",
    dry_run: bool = False,
    **fields: Any,
) -> RemotingCommand:
    body = ScheduleBody(expression=expression, body=fields.pop("body", b"go"), **fields)
    ext = {"name": name, "topic": topic} | ({"dryRun": "true"} if dry_run else {})
    return broker.call(CODE.PUT_SCHEDULE, ext, body.encode())


def listed(broker: Broker, name: str = "") -> list[ScheduleInfo]:
    answer = broker.call(CODE.LIST_SCHEDULES, {"name": name} if name else {})
    assert answer.code == 0
    return ScheduleList.decode(answer.body).schedules


@pytest.fixture
def ready(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    return broker


def test_a_schedule_is_put_shown_paused_resumed_and_deleted(ready: Broker) -> None:
    now_ms = ready.clock.wall_ms()
    answer = put(ready, properties={"TAGS": "a"}, time_zone="Asia/Tokyo")
    assert answer.code == 0
    coming = ComingInstants.decode(answer.body).coming_ms
    assert coming == [now_ms + 10_000 * step for step in range(1, 6)]
    config = ScheduleConfig(NAME, "T", b"go", "@every 10s", {"TAGS": "a"}, time_zone="Asia/Tokyo")
    assert ready.group.state.schedules[NAME].config == config
    info = ScheduleInfo(
        name=NAME,
        topic="T",
        expression="@every 10s",
        time_zone="Asia/Tokyo",
        body_bytes=2,
        next_ms=now_ms + 10_000,
    )
    assert listed(ready) == [info]
    info.body, info.properties = b"go", {"TAGS": "a"}
    assert listed(ready, NAME) == [info]
    assert listed(ready, "other") == []
    assert ready.call(CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "true"}).code == 0
    assert [(row.paused, row.next_ms) for row in listed(ready)] == [(True, 0)]
    assert ready.call(CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "false"}).code == 0
    assert not listed(ready)[0].paused
    assert ready.call(CODE.DELETE_SCHEDULE, {"name": NAME}).code == 0
    assert listed(ready) == []


def test_a_dry_run_changes_nothing(ready: Broker) -> None:
    answer = put(ready, "0 9 1 1 *", dry_run=True)
    assert (answer.code, len(ComingInstants.decode(answer.body).coming_ms)) == (0, 5)
    assert ready.group.state.schedules == {}
    assert put(ready, "0 9 31 2 *", dry_run=True).code != 0


def test_a_repeated_request_makes_no_entry(ready: Broker) -> None:
    put(ready)
    entries = ready.group.log.last_index
    assert put(ready).code == 0
    assert ready.call(CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "false"}).code == 0
    assert ready.group.log.last_index == entries


@pytest.mark.parametrize(
    ("code", "ext", "body", "answered"),
    [
        (
            CODE.PUT_SCHEDULE,
            {"name": NAME, "topic": "T"},
            ScheduleBody(expression="@every 10s", body=b"go").encode(),
            0,
        ),
        (CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "false"}, b"", 0),
        (
            CODE.PAUSE_SCHEDULE,
            {"name": "other", "paused": "true"},
            b"",
            ResponseCode.QUERY_NOT_FOUND,
        ),
        (CODE.DELETE_SCHEDULE, {"name": "other"}, b"", ResponseCode.QUERY_NOT_FOUND),
    ],
)
def test_what_changes_nothing_is_answered_by_leaders_only(
    ready: Broker, code: int, ext: dict[str, str], body: bytes, answered: int
) -> None:
    put(ready)
    ready.group.barriers_pass = False
    assert ready.handle(request(code, ext, body)) is DEFERRED
    ready.group.pass_barriers()
    assert ready.connection.replies.pop()[1].code == answered
    assert ready.handle(request(code, ext, body)) is DEFERRED
    ready.group.step_down("elsewhere:1")
    refused = ready.connection.replies.pop()[1]
    assert (refused.code, refused.ext["leaderAddr"]) == (14, "elsewhere:1")


def test_an_interval_counts_on_when_only_its_message_changes(
    ready: Broker, clock: ManualClock
) -> None:
    made_ms = ready.clock.wall_ms()
    put(ready)
    clock.now_s += 4
    answer = put(ready, body=b"other")
    assert ComingInstants.decode(answer.body).coming_ms[0] == made_ms + 10_000
    assert listed(ready)[0].next_ms == made_ms + 10_000


@pytest.mark.parametrize(
    ("change", "code", "remark"),
    [
        ({"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST, "not exist"),
        ({"topic": "TBW102"}, ResponseCode.TOPIC_NOT_EXIST, "not exist"),
        ({"topic": "read-only"}, ResponseCode.NO_PERMISSION, "forbidden"),
        ({"topic": "RMQ_SYS_DLEDGER_STATE"}, ResponseCode.NO_PERMISSION, "system topic"),
        ({"queue_id": 4}, ResponseCode.INVALID_PARAMETER, "has 4 queues"),
        ({"queue_id": -2}, ResponseCode.INVALID_PARAMETER, "illegal"),
        ({"expression": "@every 1ms"}, ResponseCode.SYSTEM_ERROR, "from 1s to 366d"),
        ({"expression": "0 0 31 2 *"}, ResponseCode.SYSTEM_ERROR, "day-of-month"),
        ({"time_zone": "Mars"}, ResponseCode.SYSTEM_ERROR, "no time zone 'Mars'"),
        ({"end_ms": 1000}, ResponseCode.SYSTEM_ERROR, "no instant of the schedule comes"),
        ({"begin_ms": 9, "end_ms": 8}, ResponseCode.SYSTEM_ERROR, "ends before it begins"),
        ({"begin_ms": 1 << 60}, ResponseCode.SYSTEM_ERROR, "1970 to 9998"),
        ({"body": b""}, ResponseCode.MESSAGE_ILLEGAL, "empty"),
        ({"body": b"x" * SCHEDULE_BYTES_MAX}, ResponseCode.SYSTEM_ERROR, "at most 16384"),
        ({"properties": {"DELAY": "3"}}, ResponseCode.SYSTEM_ERROR, "no property DELAY"),
        ({"properties": {"SCHEDULE_DUE_MS": "3"}}, ResponseCode.SYSTEM_ERROR, "SCHEDULE_DUE_MS"),
        ({"properties": {"REAL_TOPIC": "U"}}, ResponseCode.SYSTEM_ERROR, "only brokers write"),
        ({"properties": {"a": "\x02"}}, ResponseCode.SYSTEM_ERROR, "separate"),
        ({"name": "a b"}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
        ({"name": "n" * 128}, ResponseCode.SYSTEM_ERROR, "longer than 127"),
    ],
)
def test_what_cannot_be_is_refused_and_not_stored(
    ready: Broker, change: dict[str, Any], code: int, remark: str
) -> None:
    ready.make_topic("read-only", 4, PERM_READ)
    fields = {"expression": "@every 10s", **change}
    answer = put(ready, fields.pop("expression"), **fields)
    assert (answer.code, outcome_of(answer)) == (code, "not_stored")
    assert remark in (answer.remark or "")
    assert ready.group.state.schedules == {}


def test_a_body_that_cannot_be_read_is_refused(ready: Broker) -> None:
    ext = {"name": NAME, "topic": "T"}
    for body in (b"", b"[]", b'{"expression": 1}', b"\xff"):
        answer = ready.call(CODE.PUT_SCHEDULE, ext, body)
        assert (answer.code, outcome_of(answer)) == (ResponseCode.SYSTEM_ERROR, "not_stored")


@pytest.mark.parametrize("code", [CODE.DELETE_SCHEDULE, CODE.PAUSE_SCHEDULE])
def test_a_schedule_that_is_not_there_is_not_found(ready: Broker, code: int) -> None:
    answer = ready.call(code, {"name": NAME, "paused": "true"})
    assert (answer.code, outcome_of(answer)) == (ResponseCode.QUERY_NOT_FOUND, "not_stored")
    assert "no schedule nightly" in (answer.remark or "")


def test_pause_wants_one_of_two_words(ready: Broker) -> None:
    put(ready)
    assert ready.call(CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "yes"}).code != 0


def test_there_are_no_more_schedules_than_may_be(
    ready: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "SCHEDULES_MAX", 2)
    assert [put(ready, name=name).code for name in ("a", "b")] == [0, 0]
    refused = put(ready, name="c")
    assert "at most 2" in (refused.remark or "")
    assert outcome_of(refused) == "not_stored"
    assert put(ready, "@every 20s", name="b").code == 0


def test_changes_in_flight_count(ready: Broker) -> None:
    body = ScheduleBody(expression="@every 10s", body=b"go").encode()
    ext = {"name": NAME, "topic": "T"}
    assert ready.handle(request(CODE.PUT_SCHEDULE, ext, body)) is DEFERRED
    # The same again is no repetition yet, and a removal finds what is on its way.
    assert ready.handle(request(CODE.PUT_SCHEDULE, ext, body)) is DEFERRED
    assert ready.handle(request(CODE.DELETE_SCHEDULE, {"name": NAME})) is DEFERRED
    ready.group.settle()
    assert [answer.code for _, answer in ready.connection.replies[-3:]] == [0, 0, 0]
    assert ready.group.state.schedules == {}


def test_a_topic_that_is_being_deleted_takes_no_schedule(ready: Broker) -> None:
    assert ready.handle(request(CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T"})) is DEFERRED
    answer = put(ready)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def test_a_follower_names_the_leader(ready: Broker) -> None:
    put(ready)
    ready.group.step_down("10.0.0.2:10911")
    for code in (CODE.PUT_SCHEDULE, CODE.DELETE_SCHEDULE, CODE.PAUSE_SCHEDULE, CODE.LIST_SCHEDULES):
        answer = ready.call(code, {"name": NAME, "topic": "T", "paused": "true"})
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert answer.ext["leaderAddr"] == "10.0.0.2:10911"


def test_changes_have_an_audit_line_without_the_message(ready: Broker) -> None:
    with structlog.testing.capture_logs() as logged:
        put(ready, body=b"hunter2")
        put(ready, body=b"hunter3", dry_run=True)
        ready.call(CODE.PAUSE_SCHEDULE, {"name": NAME, "paused": "true"})
        ready.call(CODE.DELETE_SCHEDULE, {"name": NAME})
        listed(ready)
    lines = [line for line in logged if line["event"] == "audit"]
    assert [(line["request"], line["subject"], line["outcome"]) for line in lines] == [
        ("PUT_SCHEDULE", "topic=T name=nightly", "done"),
        ("PUT_SCHEDULE", "topic=T name=nightly dryRun=true", "done"),
        ("PAUSE_SCHEDULE", "name=nightly", "done"),
        ("DELETE_SCHEDULE", "name=nightly", "done"),
    ]
    assert "hunter2" not in str(logged)
