"""Outcomes of every error of the SDK that a caller can meet, and contents that readers compare."""

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dledger.client.core import errors
from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    ClientError,
    ConfirmationNeededError,
    OffsetIllegalError,
    ReplyTimedOutError,
    RequestFailedError,
    RequestTimedOutError,
    StepOvertakenError,
)
from dledger.client.core.message import Message
from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.jepsen_like.checkers.contents import BODY, BORN, PROPERTIES, STORED
from dledger.jepsen_like.history.operation import F, History, Outcome, RunHeader
from dledger.jepsen_like.plans.plan import Plan
from dledger.jepsen_like.workloads.recorder import (
    BORN_WITHIN_MS,
    OUTCOMES,
    Contents,
    Recorder,
    classify,
)
from dledger.remoting.protocol.own_fields import given_up

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ClientError) and value is not ClientError
]


def make(kind: type[MQError]) -> MQError:
    if issubclass(kind, ReplyTimedOutError):
        return kind("x", send_result=None)  # type: ignore[arg-type]  # it is not read
    if issubclass(kind, OffsetIllegalError):
        return kind("x", next_begin_offset=0, min_offset=0, max_offset=0)
    if issubclass(kind, StepOvertakenError):
        return kind("x", code=1, committed_offset=0)
    if issubclass(kind, ConfirmationNeededError):
        return kind("x", code=1, remark="", given_up=given_up("s", {}))
    if issubclass(kind, BrokerRefusedError | BrokerBusyError):
        return kind("x", code=1)
    if issubclass(kind, RequestFailedError):
        return kind("x", code=1)
    return kind("x")


@pytest.mark.parametrize("kind", [*CLASSES, LocalProtocolError])
def test_every_sdk_error_has_a_row_that_agrees(kind: type[MQError]) -> None:
    classified = classify(make(kind))
    assert classified.is_known
    assert (classified.outcome is Outcome.INFO) == (make(kind).outcome == "unknown")
    assert OUTCOMES[kind] is classified.outcome


def test_unlisted_error_is_info_and_is_named() -> None:
    class NewError(RequestTimedOutError):
        pass

    assert classify(NewError("x")) == (Outcome.INFO, False)
    assert classify(KeyError("x")) == (Outcome.INFO, False)


def test_error_with_unknown_outcome_is_never_a_failure() -> None:
    error = RequestFailedError("x", code=1)
    error.outcome = "unknown"  # type: ignore[misc]  # as an instance may
    assert classify(error) == (Outcome.INFO, True)


NOW_MS = 1_000_000
SENT = Message("t", b"12345678....", tags="a", keys="k l", properties={"own": "1"})


class Seen(msgspec.Struct, frozen=True):
    body: bytes = b"12345678...."
    tags: str = "a"
    keys: str = "k l"
    properties: dict[str, str] = msgspec.field(
        default_factory=lambda: {"own": "1", "UNIQ_KEY": "added"}
    )
    born_timestamp_ms: int = NOW_MS + 5


def noted(*, is_hostile: bool = False) -> Contents:
    contents = Contents()
    contents.note(7, SENT, NOW_MS, is_hostile=is_hostile)
    return contents


@pytest.mark.parametrize(
    ("change", "anomaly"),
    [
        ({}, ""),
        ({"body": b"12345678..."}, BODY),
        ({"body": b"12345678...,"}, BODY),
        ({"tags": ""}, PROPERTIES),
        ({"keys": "k"}, PROPERTIES),
        ({"properties": {"UNIQ_KEY": "added"}}, PROPERTIES),
        ({"properties": {"own": "2"}}, PROPERTIES),
        ({"born_timestamp_ms": NOW_MS - 1}, BORN),
        ({"born_timestamp_ms": NOW_MS + BORN_WITHIN_MS + 1}, BORN),
    ],
)
def test_what_was_altered_is_named(change: dict[str, Any], anomaly: str) -> None:
    assert noted().difference(7, msgspec.structs.replace(Seen(), **change)) == anomaly


def test_a_later_read_has_the_time_of_birth_of_the_first() -> None:
    contents = noted()
    assert contents.difference(7, Seen()) == ""
    assert contents.difference(7, Seen(born_timestamp_ms=NOW_MS + 6)) == BORN
    assert contents.difference(7, Seen()) == ""


def test_reserved_properties_may_change_and_unknown_values_too() -> None:
    assert noted(is_hostile=True).difference(7, Seen(properties={})) == ""
    assert noted().difference(8, Seen(body=b"other")) == ""


@pytest.mark.parametrize(
    ("times_ms", "anomaly"), [((1, 1, 3), ""), ((1, 3, 2), STORED), ((5, 0, 0), STORED), ((), "")]
)
def test_found_messages_were_stored_in_their_order(times_ms: tuple[int, ...], anomaly: str) -> None:
    stage: Any = SimpleNamespace(elapsed_s=1.0)
    recorder = Recorder(stage, Plan(1, 1000), History(RunHeader("")))
    messages: Any = [
        SimpleNamespace(body=value.to_bytes(8, "big"), store_timestamp_ms=time_ms)
        for value, time_ms in enumerate(times_ms)
    ]
    op = recorder.begin(recorder.new_process(), F.PULL)
    assert recorder.found(op, messages) == list(range(len(times_ms)))
    assert op.err == anomaly
