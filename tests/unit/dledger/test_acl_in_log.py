"""``dledger acl --cluster``: a drawn secret is not lost, groups are checked before a change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dledger.cli import acl_in_log
from dledger.cli.main import main
from dledger.client.core.errors import RequestFailedError
from dledger.remoting.protocol.access_bodies import AclConfig, PlainAccessConfig, UserInfo

NAME = "order-service"
GROUPS = ("broker-a", "broker-b")


class Clusters:
    """Accounts of two broker groups; a group of *refusing* takes no change."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, PlainAccessConfig]] = {name: {} for name in GROUPS}
        self.secrets: dict[str, str] = {}
        self.refusing = ""

    def have(self, broker: str, **fields: Any) -> None:
        self.rows[broker][NAME] = PlainAccessConfig(access_key=NAME, **fields)

    def _reach(self, broker: str) -> None:
        if broker == self.refusing:
            raise RequestFailedError(f"put account {NAME} on {broker}: refused", code=1)

    async def accounts(self) -> dict[str, AclConfig]:
        return {
            name: AclConfig(plain_access_configs=list(rows.values()))
            for name, rows in self.rows.items()
        }

    async def users(self) -> dict[str, list[UserInfo]]:
        return {}

    async def policies(self) -> dict[str, Any]:
        return {}

    async def put_account(
        self, name: str, *, broker_names: tuple[str, ...] = GROUPS, **fields: Any
    ) -> None:
        for broker in broker_names:
            self._reach(broker)
            self.secrets[broker] = fields.get("secret_key", "")
            topics = [f"{topic}={text}" for topic, text in fields["topics"].items()]
            self.rows[broker][name] = PlainAccessConfig(access_key=name, topic_perms=topics)

    async def update_user(self, name: str, *, password: str) -> None:
        for broker in GROUPS:
            self._reach(broker)
            self.secrets[broker] = password

    def lines(self, broker: str) -> list[str]:
        return self.rows[broker][NAME].topic_perms


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    made = Clusters()

    @asynccontextmanager
    async def admin(_: str) -> AsyncIterator[Clusters]:
        yield made

    monkeypatch.setattr(acl_in_log, "open_admin", admin)
    return made


@pytest.mark.parametrize("refusing", ["", "broker-b"])
@pytest.mark.parametrize("command", [("add", "--cluster"), ("secret",)])
def test_a_drawn_secret_is_printed_where_a_group_has_it(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], refusing: str
) -> None:
    """The first group has it when the second one refuses: without it no client signs there."""
    if command == ("secret",):
        for broker in GROUPS:
            clusters.have(broker)
    clusters.refusing = refusing
    assert main(["acl", command[0], NAME, *command[1:]]) == (1 if refusing else 0)
    printed = capsys.readouterr()
    assert printed.out == f"{clusters.secrets['broker-a']}\n"
    assert len(printed.out) > 30
    assert ("may have the secret" in printed.err) == bool(refusing)


def test_a_given_secret_is_not_printed(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2-hunter2\n")
    clusters.refusing = "broker-b"
    assert main(["acl", "add", NAME, "--cluster", "--secret-file", str(file)]) == 1
    printed = capsys.readouterr()
    assert clusters.secrets == {"broker-a": "hunter2-hunter2"}
    assert "hunter2" not in printed.out + printed.err


def test_a_secret_is_drawn_where_each_group_has_the_account(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have("broker-a")
    assert main(["acl", "secret", NAME]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"broker-b: account {NAME} does not exist" in printed.err
    assert clusters.secrets == {}


def test_lines_are_checked_in_each_group_before_a_change(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have("broker-a", topic_perms=["orders=PUB"])
    clusters.have("broker-b")
    assert main(["acl", "revoke", NAME, "--cluster", "--topic", "orders"]) == 1
    assert "broker-b: the account has no line about orders" in capsys.readouterr().err
    assert clusters.lines("broker-a") == ["orders=PUB"], "nothing is changed in any group"
    del clusters.rows["broker-b"][NAME]
    assert main(["acl", "grant", NAME, "--cluster", "--topic", "bills=SUB"]) == 1
    assert clusters.lines("broker-a") == ["orders=PUB"]
    clusters.have("broker-b", topic_perms=["orders=SUB"])
    assert main(["acl", "revoke", NAME, "--cluster", "--topic", "orders"]) == 0
    assert [clusters.lines(broker) for broker in GROUPS] == [[], []]
