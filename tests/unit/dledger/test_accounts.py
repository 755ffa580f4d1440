"""The accounts that count on a member: the file's first, then those that it has applied."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing
from msgspec.structs import replace

from dledger.commitlog.disk import OsDisk
from dledger.processors.access import SPARE_ROWS, BrokerAccounts
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import ADMIN, SIGNED, Permission, Right, Rule, topic_right
from dledger.remoting.access.gate import AccessGate
from dledger.remoting.errors import AccessRefusedError
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.signature import ACCESS_KEY, Credentials
from dledger.state.accounts import AccessChange, AccountConfig, PolicyConfig
from dledger.testing.doubles import ManualClock
from tests.harness.fake_group import FakeGroup

SECRET, IN_FILE = "hunter2-hunter2", "0123456789"
FREE, FOR_ADMINS, PUBLISHING = 1, 2, 3
RULES = {
    FREE: SIGNED,
    FOR_ADMINS: ADMIN,
    PUBLISHING: Rule(rights=lambda asked: [topic_right(asked.ext["topic"], Permission.PUB)]),
}


def put(group: FakeGroup, *accounts: AccountConfig, white: str | None = None, rm: str = "") -> None:
    delete = (rm,) if rm else ()
    group.store(AccessChange(accounts, delete, white))


@pytest.fixture
def accounts(group: FakeGroup, tmp_path: Path) -> BrokerAccounts:
    path = tmp_path / "accounts.toml"
    path.write_text(
        'global_white_addresses = "10.9.9.9"\n'
        f'[accounts.operator]\nsecret_key = "{IN_FILE}"\nadmin = true\n'
    )
    return BrokerAccounts(AccountStore(OsDisk(), str(path)), lambda: group.state)


@pytest.fixture
def gate(accounts: BrokerAccounts, clock: ManualClock) -> AccessGate:
    return AccessGate(accounts, RULES, clock, Random(1))


def refused(gate: AccessGate, command: RemotingCommand, host: str = "10.1.1.1") -> str:
    """Return why a request does not reach its handler; empty: it does."""
    connection = cast("Any", SimpleNamespace(peer_address=(host, 1), attributes={}))
    handler = gate.guard(command.code, lambda _, asked: response_to(asked))
    try:
        handler(connection, command)
    except AccessRefusedError as error:
        return str(error)
    return ""


def signed(code: int, who: str, secret: str = SECRET, **ext: Any) -> RemotingCommand:
    command = request(code, ext, b"body")
    Credentials(who, secret).sign(command)
    return command


def test_account_of_the_log_counts_when_it_is_applied(group: FakeGroup, gate: AccessGate) -> None:
    ask = signed(PUBLISHING, "order-service", topic="orders")
    assert "Check signature failed" in refused(gate, ask)
    put(group, AccountConfig("order-service", SECRET, topics={"orders": "PUB"}))
    assert refused(gate, ask) == ""
    assert "No default permission" in refused(
        gate, signed(PUBLISHING, "order-service", topic="other")
    )
    assert "Need admin permission" in refused(gate, signed(FOR_ADMINS, "order-service"))
    put(group, AccountConfig("order-service", "another-secret", admin=True))
    assert "Check signature failed" in refused(gate, ask)
    assert refused(gate, signed(FOR_ADMINS, "order-service", "another-secret")) == ""
    put(group, rm="order-service")
    assert "Check signature failed" in refused(
        gate, signed(FREE, "order-service", "another-secret")
    )


def test_the_file_counts_before_the_log(group: FakeGroup, gate: AccessGate) -> None:
    put(group, AccountConfig("operator", SECRET))
    assert refused(gate, signed(FOR_ADMINS, "operator", IN_FILE)) == ""
    assert "Check signature failed" in refused(gate, signed(FREE, "operator", SECRET))


def test_white_addresses_of_both_count(group: FakeGroup, gate: AccessGate) -> None:
    plain = request(FREE, {})
    assert refused(gate, plain, "10.9.9.9") == ""
    assert "No accessKey" in refused(gate, plain, "10.8.8.8")
    put(group, white="10.8.*.*")
    assert refused(gate, plain, "10.9.9.9") == ""
    assert refused(gate, plain, "10.8.8.8") == ""
    put(group, white="")
    assert "No accessKey" in refused(gate, plain, "10.8.8.8")


def test_a_disabled_account_is_refused_from_anywhere(group: FakeGroup, gate: AccessGate) -> None:
    """As one that is not there: the answer does not say that there is one."""
    row = AccountConfig("order-service", SECRET, white_address="10.7.7.7")
    put(group, row)
    named = request(FREE, {ACCESS_KEY: "order-service"})
    assert refused(gate, named, "10.7.7.7") == ""
    put(group, replace(row, enabled=False))
    absent = refused(gate, signed(FREE, "order-unknown"))
    for command, host in (
        (signed(FREE, "order-service"), "10.1.1.1"),
        (named, "10.7.7.7"),
        (named, "10.9.9.9"),
    ):
        why = refused(gate, command, host)
        assert why.replace("order-service", "order-unknown") == absent


def test_policies_are_asked_with_the_address(group: FakeGroup, gate: AccessGate) -> None:
    policy = PolicyConfig("Custom", "Topic:ord*", ("Pub",), ("10.1.0.0/16",), "Allow")
    put(group, AccountConfig("order-service", SECRET, policies=(policy,)))
    ask = signed(PUBLISHING, "order-service", topic="orders")
    assert refused(gate, ask, "10.1.1.1") == ""
    assert "No default permission" in refused(gate, ask, "10.2.1.1")


def test_an_account_that_cannot_be_read_grants_nothing(
    group: FakeGroup, accounts: BrokerAccounts, gate: AccessGate
) -> None:
    """What another version wrote in it may forbid something."""
    put(group, AccountConfig("order-service", SECRET, default_topic_perm="EVERYTHING"))
    put(group, white="somewhere")
    with structlog.testing.capture_logs() as lines:
        assert "Check signature failed" in refused(gate, signed(FREE, "order-service"))
        assert accounts.get("order-service") is None
        assert not accounts.is_white("10.8.8.8")
        assert not accounts.is_white("10.8.8.8")
    named = [line["event"] for line in lines if line["log_level"] == "error"]
    assert named == ["white_addresses_not_read", "account_not_read"]
    assert SECRET not in str(lines)


def test_what_was_made_of_accounts_is_bounded(group: FakeGroup, accounts: BrokerAccounts) -> None:
    first = AccountConfig("service-0", SECRET)
    put(group, first)
    assert accounts.get("service-0") is accounts.get("service-0"), "made once"
    for number in range(SPARE_ROWS + 5):
        group.state.accounts.clear()
        group.state.accounts[f"service-{number}"] = replace(first, access_key=f"service-{number}")
        assert accounts.get(f"service-{number}") is not None
    assert len(accounts._made) <= SPARE_ROWS + 2


def test_a_right_to_all_wants_no_line_of_the_broker(accounts: BrokerAccounts) -> None:
    operator = accounts.get("operator")
    assert operator is not None
    assert operator.allows(Right("SCHEDULE_TOPIC_XXXX", Permission.SUB, by_line=True))
