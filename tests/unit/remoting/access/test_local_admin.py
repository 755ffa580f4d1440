"""Without access control, what erases data or changes the cluster comes from this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from dledger.processors.wiring import LOCAL_ADMIN as BROKER_CODES
from namesrv.server import LOCAL_ADMIN as NAMESRV_CODES
from remoting.access.local_admin import LocalAdmin, is_loopback
from remoting.errors import AccessRefusedError
from remoting.processor import Limiter
from remoting.processor_table import ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request, response_to

CODES = frozenset({RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.UPDATE_BROKER_CONFIG})


def asked(code: int, host: str, guard: LocalAdmin) -> str:
    """Return the refusal of a request of *host*, empty when the handler answered."""
    table = ProcessorTable(guard.guard)
    table.register(code, lambda _, command: response_to(command), Limiter("test", 1))
    processor = table.get(code)
    assert processor is not None
    connection: Any = SimpleNamespace(peer_address=(host, 1))
    try:
        answered = processor.handler(connection, request(code))
    except AccessRefusedError as error:
        return str(error)
    assert isinstance(answered, RemotingCommand)
    assert answered.code == 0
    return ""


@pytest.mark.parametrize("host", ["10.0.0.7", "192.168.1.1", "2001:db8::1", "::ffff:10.0.0.7", "?"])
def test_local_admin_refuses_another_machine_with_remedies(host: str) -> None:
    guard = LocalAdmin(CODES)
    refusal = asked(RequestCode.DELETE_TOPIC_IN_BROKER, host, guard)
    assert "DELETE_TOPIC_IN_BROKER (215) erases data or changes the cluster" in refusal
    assert "aclEnable=true" in refusal
    assert "openAdmin=true" in refusal
    assert guard.refused == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_local_admin_lets_its_own_machine_pass(host: str) -> None:
    assert is_loopback(host)
    assert asked(RequestCode.DELETE_TOPIC_IN_BROKER, host, LocalAdmin(CODES)) == ""


def test_local_admin_leaves_other_requests_to_everybody() -> None:
    guard = LocalAdmin(BROKER_CODES)
    for code in (
        RequestCode.SEND_MESSAGE,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.GET_BROKER_CONFIG,
    ):
        assert asked(code, "10.0.0.7", guard) == ""


def test_local_admin_logs_each_request_code_once() -> None:
    guard = LocalAdmin(CODES)
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            for code in sorted(CODES):
                asked(code, "10.0.0.7", guard)
    assert sorted((line["event"], line["request"]) for line in lines) == [
        ("remote_admin_refused", "DELETE_TOPIC_IN_BROKER"),
        ("remote_admin_refused", "UPDATE_BROKER_CONFIG"),
    ]
    assert guard.refused == 10


def test_the_codes_that_are_guarded_are_these() -> None:
    """The whole list, so that none leaves it unnoticed."""
    assert {RequestCode(code).name for code in BROKER_CODES} == {
        "UPDATE_BROKER_CONFIG",
        "DELETE_TOPIC_IN_BROKER",
        "DELETE_SUBSCRIPTIONGROUP",
        "CLEAN_EXPIRED_CONSUMEQUEUE",
        "CLEAN_UNUSED_TOPIC",
        "DELETE_EXPIRED_COMMITLOG",
        "RAFT_CHANGE",
    }
    assert {RequestCode(code).name for code in NAMESRV_CODES} == {
        "WIPE_WRITE_PERM_OF_BROKER",
        "ADD_WRITE_PERM_OF_BROKER",
        "DELETE_TOPIC_IN_NAMESRV",
        "PUT_KV_CONFIG",
        "DELETE_KV_CONFIG",
        "UPDATE_NAMESRV_CONFIG",
    }
