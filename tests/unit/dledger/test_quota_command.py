"""``dledger quota``: what is given changes, the rest stays; a list shows what was refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dledger.cli import quota_command
from dledger.cli.main import main
from dledger.client.admin.quotas import QuotaAdmin
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand, request, response_to
from dledger.remoting.protocol.quota_bodies import QuotaHeader, QuotaInfo, QuotaList

GROUPS = ("broker-a", "broker-b")


class Clusters(QuotaAdmin):
    """Quotas of two broker groups."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple[str, str], QuotaInfo]] = {name: {} for name in GROUPS}

    def have(self, broker: str, **fields: Any) -> None:
        quota = QuotaInfo(**fields)
        self.rows[broker][quota.kind, quota.name] = quota

    async def _change_on_every_leader(
        self,
        code: RequestCode,
        ext: ExtFields,
        names: tuple[str, ...] | None,
        what: str,
        body: bytes = b"",
    ) -> list[str]:
        header = QuotaHeader.decode(ext)
        fields = {name: getattr(header, name) for name in QuotaHeader.__slots__ if name != "op"}
        for broker in names or GROUPS:
            self.rows[broker].pop((header.kind, header.name or ""), None)
            if header.op == "put":
                self.have(broker, **{**fields, "name": header.name or ""})
        return list(names or GROUPS)

    async def _leading(self) -> list[str]:
        return list(GROUPS)

    async def _ask_leader(
        self, name: str, code: RequestCode, ext: ExtFields, topic: str
    ) -> RemotingCommand:
        rows = QuotaList(quotas=list(self.rows[name].values()))
        return response_to(request(code), 0, None, None, rows.encode())


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    made = Clusters()

    @asynccontextmanager
    async def admin(_: str) -> AsyncIterator[Clusters]:
        yield made

    monkeypatch.setattr(quota_command, "_admin", admin)
    return made


def rows(clusters: Clusters, broker: str) -> list[dict[str, Any]]:
    """Return the fields that are set of each quota."""
    plain = [msgspec.to_builtins(quota) for quota in clusters.rows[broker].values()]
    return [{name: value for name, value in row.items() if value} for row in plain]


def test_limits_that_are_not_given_stay(clusters: Clusters) -> None:
    clusters.have("broker-a", kind="account", name="orders", sent_bytes_per_s=9, connections=2)
    arguments = ("--account", "orders", "--send-messages", "1_000", "--connections", "none")
    assert main(["quota", "set", *arguments]) == 0
    made = {"kind": "account", "name": "orders", "sentMessagesPerS": 1000}
    assert rows(clusters, "broker-a") == [{**made, "sentBytesPerS": 9}]
    assert rows(clusters, "broker-b") == [made]
    assert main(["quota", "set", "--account", "orders", "--unlimited"]) == 0
    assert rows(clusters, "broker-a") == [{"kind": "account", "name": "orders"}]


def test_a_default_is_named_by_its_kind(clusters: Clusters) -> None:
    assert main(["quota", "set", "--default", "client", "--receive-bytes", "5"]) == 0
    assert rows(clusters, "broker-b") == [{"kind": "client", "receivedBytesPerS": 5}]
    assert main(["quota", "rm", "--default", "client"]) == 0
    assert rows(clusters, "broker-b") == []


def test_a_quota_is_removed_where_it_is(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have("broker-b", kind="client", name="10.0.0.1", connections=2)
    assert main(["quota", "rm", "--client", "10.0.0.1"]) == 0
    assert "removed in broker-b" in capsys.readouterr().err
    assert main(["quota", "rm", "--client", "10.0.0.1"]) == 1
    assert "there is no quota of client 10.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--send-messages", "5"], "name one of --account, --client and --default"),
        (["--account", "a", "--client", "b", "--send-messages", "5"], "name one of"),
        (["--account", "", "--send-messages", "5"], "name one of"),
        (["--account", "a"], "nothing to set"),
        (["--account", "a", "--send-messages", "0"], "'0' is no number from 1 on"),
        (["--account", "a", "--connections", "few"], "'few' is no number from 1 on"),
    ],
)
def test_what_makes_no_quota_is_refused_and_nothing_done(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(["quota", "set", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert rows(clusters, "broker-a") == []


def test_a_list_shows_limits_and_what_was_refused(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have(
        "broker-a",
        kind="account",
        name="orders",
        sent_messages_per_s=1000,
        sent_bytes_per_s=1 << 20,
        refused=7,
        throttled_ms=1500,
        open_connections=3,
    )
    clusters.have("broker-b", kind="client", name="", received_bytes_per_s=5)
    assert main(["quota", "ls"]) == 0
    table = capsys.readouterr().out
    assert "1,000/s 1,048,576 B/s" in table
    assert "(default)" in table
    assert main(["quota", "ls", "--output", "json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["broker"], first["refused"], first["throttled_ms"]) == ("broker-a", 7, 1500)
    assert (first["sent_bytes_per_s"], first["open_connections"]) == (1 << 20, 3)
    assert (second["name"], second["received_bytes_per_s"]) == ("(default)", 5)


async def test_an_admin_names_an_account_or_a_client() -> None:
    with pytest.raises(ValueError, match="name an account or a client"):
        await Clusters().set_quota(connections=5)
    with pytest.raises(ValueError, match="name an account or a client"):
        await Clusters().delete_quota(account="a", client="b")
