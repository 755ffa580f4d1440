"""A request passes with the right signature and the rights it needs, and not otherwise.

Without access control, what erases data or changes the cluster comes from this machine.
"""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.server import LOCAL_ADMIN as NAMESRV_CODES
from dledger.processors.wiring import LOCAL_ADMIN as BROKER_CODES
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import ADMIN, SIGNED, Permission, Right, Rule
from dledger.remoting.access.gate import AccessGate, LocalAdmin, admitted_account, limited_account
from dledger.remoting.addresses import is_loopback
from dledger.remoting.errors import AccessRefusedError, BadRequestError
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import Condition, answer_error, condition_of
from dledger.remoting.protocol.signature import Credentials
from dledger.testing.doubles import ManualClock
from tests.harness.present import present

ACCOUNTS = """\
global_white_addresses = "10.9.9.9"
[accounts.producer-1]
secret_key = "0123456789"
topics = { T = "PUB" }
[accounts.admin-1]
secret_key = "0123456789"
admin = true
[accounts.neighbour]
secret_key = "0123456789"
white_address = "10.0.0.*"
"""

FREE, FOR_ADMINS, PUBLISHING, BROKEN, UNDECIDED, INNER = 1, 2, 3, 4, 5, 6


def broken(_: RemotingCommand) -> list[Right]:
    raise BadRequestError("the custom field topic is null")


RULES = {
    FREE: SIGNED,
    FOR_ADMINS: ADMIN,
    PUBLISHING: Rule(rights=lambda asked: [Right(asked.ext["topic"], Permission.PUB)]),
    BROKEN: Rule(rights=broken),
    INNER: Rule(rights=lambda asked: [Right(asked.ext["topic"], Permission.SUB, by_line=True)]),
}


@pytest.fixture
def gate(tmp_path: Path, clock: ManualClock) -> AccessGate:
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNTS)
    return AccessGate(AccountStore(OsDisk(), str(path)), RULES, clock, Random(1))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def called(
    gate: AccessGate, command: RemotingCommand, host: str = "10.1.1.1"
) -> tuple[str, list[RemotingCommand]]:
    """Return the text of the refusal, empty when there was none, and what reached the handler."""
    reached: list[RemotingCommand] = []

    def handler(_: Any, asked: RemotingCommand) -> RemotingCommand:
        reached.append(asked)
        return response_to(asked)

    table = ProcessorTable(gate.guard)
    table.register(command.code, handler, Limiter("test", 1))
    processor = present(table.get(command.code))
    try:
        connection = SimpleNamespace(peer_address=(host, 1), attributes={})
        answered = processor.handler(connection, command)  # type: ignore[arg-type]  # what a guard reads
    except AccessRefusedError as error:
        return str(error), reached
    assert isinstance(answered, RemotingCommand)
    return "", reached


def signed(code: int, who: str, **ext: Any) -> RemotingCommand:
    command = request(code, ext, b"body")
    Credentials(who, "0123456789").sign(command)
    return command


PREFIX = "org.apache.rocketmq.acl.common.AclException: "


def test_a_signed_request_reaches_its_handler(gate: AccessGate) -> None:
    command = signed(FREE, "producer-1")
    assert called(gate, command) == ("", [command])


def test_gate_binds_an_account_to_its_names_not_administrators(gate: AccessGate) -> None:
    found = {}

    def handler(connection: Any, asked: RemotingCommand) -> RemotingCommand:
        found[asked.ext["AccessKey"]] = (admitted_account(connection), limited_account(connection))
        return response_to(asked)

    connection: Any = SimpleNamespace(peer_address=("10.1.1.1", 1), attributes={})
    guarded = gate.guard(FREE, handler)
    for who in ("producer-1", "admin-1"):
        guarded(connection, signed(FREE, who))
    assert found == {"producer-1": ("producer-1", "producer-1"), "admin-1": ("admin-1", "")}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (request(FREE), "No accessKey is configured"),
        (request(FREE, {"AccessKey": ""}), "No accessKey is configured"),
        (request(FREE, {"AccessKey": 7}), "No accessKey is configured"),
        (signed(FREE, "stranger-1"), "Check signature failed for accessKey=stranger-1"),
        (request(FREE, {"AccessKey": "admin-1"}), "Check signature failed for accessKey=admin-1"),
        (
            request(FREE, {"AccessKey": "admin-1", "Signature": "AAAA"}),
            "Check signature failed for accessKey=admin-1",
        ),
        (
            signed(FOR_ADMINS, "producer-1"),
            "Need admin permission for request code=2, but accessKey=producer-1 is not",
        ),
        (signed(PUBLISHING, "producer-1", topic="U"), "No default permission for topic: U"),
    ],
)
def test_gate_refuses_in_the_words_of_rocketmq(
    gate: AccessGate, command: RemotingCommand, words: str
) -> None:
    assert called(gate, command) == (PREFIX + words, [])
    assert gate.refused == 1


def test_a_refusal_is_code_1_not_stored_and_final() -> None:
    error = AccessRefusedError("No accessKey is configured")
    answered = answer_error(request(10), error)
    assert condition_of(error) is Condition.ACCESS_REFUSED
    assert (answered.code, answered.remark) == (1, PREFIX + "No accessKey is configured")
    assert answered.ext == {"outcome": "not_stored"}


def test_an_administrator_passes(gate: AccessGate) -> None:
    assert called(gate, signed(FOR_ADMINS, "admin-1"))[0] == ""
    assert called(gate, signed(PUBLISHING, "admin-1", topic="any"))[0] == ""


def test_a_handler_learns_whose_rights_counted(gate: AccessGate) -> None:
    seen: list[str] = []

    def handler(connection: Any, command: RemotingCommand) -> RemotingCommand:
        seen.append(admitted_account(connection))
        return response_to(command)

    guarded = gate.guard(FOR_ADMINS, handler)
    connection: Any = SimpleNamespace(peer_address=("10.0.0.1", 1), attributes={})
    assert admitted_account(connection) == ""
    guarded(connection, signed(FOR_ADMINS, "admin-1"))
    assert seen == ["admin-1"]
    # A name that a client only claims is not taken over.
    with pytest.raises(AccessRefusedError):
        guarded(connection, request(FOR_ADMINS, {"AccessKey": "admin-2"}))
    assert admitted_account(connection) == "admin-1"


def test_a_code_without_a_rule_is_for_administrators(gate: AccessGate) -> None:
    assert "Need admin permission" in called(gate, signed(UNDECIDED, "producer-1"))[0]
    assert called(gate, signed(UNDECIDED, "admin-1"))[0] == ""


def test_gate_answers_an_unknown_account_like_a_wrong_signature(gate: AccessGate) -> None:
    wrong = request(FREE, {"AccessKey": "admin-1", "Signature": "AAAA"})
    absent = request(FREE, {"AccessKey": "admin-2", "Signature": "AAAA"})
    known_to_nobody = signed(FREE, "admin-2")
    Credentials("admin-2", "\0" * 16).sign(known_to_nobody)
    answers = {
        called(gate, command)[0].replace("admin-1", "X").replace("admin-2", "X")
        for command in (wrong, absent, known_to_nobody)
    }
    assert answers == {PREFIX + "Check signature failed for accessKey=X"}


def test_white_addresses_need_no_signature(gate: AccessGate) -> None:
    assert called(gate, request(FREE), host="10.9.9.9")[0] == ""
    assert called(gate, request(PUBLISHING, {"topic": "any"}), host="10.9.9.9")[0] == ""
    named = request(FOR_ADMINS, {"AccessKey": "admin-1"})
    assert called(gate, named, host="10.9.9.9")[0] == ""
    unsigned = request(FREE, {"AccessKey": "neighbour"})
    assert called(gate, unsigned, host="10.0.0.77")[0] == ""
    assert "Check signature failed" in called(gate, unsigned, host="10.0.1.77")[0]
    # The address is white for its own account only.
    assert (
        "Check signature"
        in called(gate, request(FREE, {"AccessKey": "producer-1"}), host="10.0.0.77")[0]
    )


@pytest.mark.parametrize(
    ("command", "host", "words"),
    [
        (
            request(FOR_ADMINS, {"AccessKey": "neighbour"}),
            "10.0.0.77",
            "accessKey=neighbour is not",
        ),
        (
            request(PUBLISHING, {"AccessKey": "neighbour", "topic": "T"}),
            "10.0.0.77",
            "No default permission for topic: T",
        ),
        (request(FOR_ADMINS), "10.9.9.9", "accessKey=none is not"),
        (
            request(PUBLISHING, {"AccessKey": "producer-1", "topic": "U"}),
            "10.9.9.9",
            "No default permission for topic: U",
        ),
        (request(INNER, {"topic": "SCHEDULE"}), "10.9.9.9", "No default permission for topic"),
        (request(FREE, {"AccessKey": "nobody-1"}), "10.9.9.9", "Check signature failed"),
    ],
)
def test_gate_gives_a_white_address_its_accounts_rights(
    gate: AccessGate, command: RemotingCommand, host: str, words: str
) -> None:
    refusal, reached = called(gate, command, host=host)
    assert words in refusal
    assert reached == []


def test_gate_reports_damage_only_to_signed_requests(gate: AccessGate) -> None:
    assert "Check signature failed" in called(gate, request(BROKEN, {"AccessKey": "producer-1"}))[0]
    with pytest.raises(BadRequestError, match="topic is null"):
        called(gate, signed(BROKEN, "producer-1"))


def test_every_handler_of_a_table_with_a_guard_is_guarded(gate: AccessGate) -> None:
    table = ProcessorTable(gate.guard)
    for code in RULES:
        table.register(code, lambda _, asked: response_to(asked), Limiter("test", 1))
    for copy in (table, table.without(())):
        for code in copy.codes():
            processor = present(copy.get(code))
            with pytest.raises(AccessRefusedError):
                processor.handler(SimpleNamespace(peer_address=("10.1.1.1", 1)), request(code))  # type: ignore[arg-type]  # what a guard reads


def test_without_a_guard_the_handler_is_the_handler_itself() -> None:
    def handler(_: Any, asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked)

    table = ProcessorTable()
    table.register(FREE, handler, Limiter("test", 1))
    processor = present(table.get(FREE))
    assert processor.handler is handler


def test_refusals_are_logged_once_a_second_with_their_number(
    gate: AccessGate, clock: ManualClock
) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            called(gate, request(FREE, {"AccessKey": "x" * 100, "Signature": "the signature"}))
        clock.now_s += 1.0
        called(gate, request(FREE))
    assert [(line["event"], line["times"]) for line in lines] == [
        ("access_refused", 1),
        ("access_refused", 10),
    ]
    assert lines[0]["access_key"] == "x" * 64
    assert "the signature" not in str(lines)


CODES = frozenset({RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.UPDATE_BROKER_CONFIG})


def asked(code: int, host: str, guard: LocalAdmin) -> str:
    """Return the refusal of a request of *host*, empty when the handler answered."""
    table = ProcessorTable(guard.guard)
    table.register(code, lambda _, command: response_to(command), Limiter("test", 1))
    processor = present(table.get(code))
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
        *("UPDATE_BROKER_CONFIG", "DELETE_TOPIC_IN_BROKER", "DELETE_SUBSCRIPTIONGROUP"),
        *("CLEAN_EXPIRED_CONSUMEQUEUE", "CLEAN_UNUSED_TOPIC", "DELETE_EXPIRED_COMMITLOG"),
        *("RAFT_CHANGE", "UPDATE_AND_CREATE_ACL_CONFIG", "DELETE_ACL_CONFIG"),
        *("UPDATE_GLOBAL_WHITE_ADDRS_CONFIG", "AUTH_CREATE_USER", "AUTH_UPDATE_USER"),
        *("AUTH_DELETE_USER", "AUTH_CREATE_ACL", "AUTH_UPDATE_ACL", "AUTH_DELETE_ACL"),
    }
    assert {RequestCode(code).name for code in NAMESRV_CODES} == {
        *("WIPE_WRITE_PERM_OF_BROKER", "ADD_WRITE_PERM_OF_BROKER", "DELETE_TOPIC_IN_NAMESRV"),
        *("PUT_KV_CONFIG", "DELETE_KV_CONFIG", "UPDATE_NAMESRV_CONFIG"),
    }
