"""``dledger quota``: what accounts and clients may use of each broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from dledger.cli.watch import Watch, repeated
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    RowsOutput,
    addresses,
    note,
    show,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.protocol.quota_bodies import QuotaInfo

app = App(name="quota", help="Show and change quotas of accounts and clients.", backend="trio")

COLUMNS: Final = ("broker", "kind", "name", "sends", "receives", "connections", "refused")

DEFAULT_NAME: Final = "(default)"

NO_LIMIT: Final = "none"

Account = Annotated[str | None, Parameter(help="Access key of an account.")]
Client = Annotated[str | None, Parameter(help="Id or address of clients that have no account.")]
Default = Annotated[
    Literal["account", "client"] | None,
    Parameter(help="Of each account, or client, that has no quota of its own."),
]
Limit = Annotated[str | None, Parameter(help="A number, or none.")]


@asynccontextmanager
async def _admin(namesrv: str) -> AsyncIterator[Admin]:
    from dledger.cli.ask_cluster import open_client
    from dledger.client.admin.admin import Admin

    async with open_client(addresses(namesrv)) as client:
        yield Admin(client)


@app.command(name="ls")
async def list_quotas(
    *,
    watch: Watch = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: RowsOutput = "table",
) -> int:
    """List quotas, and how many requests the leader refused because of each."""

    async def look() -> int:
        async with _admin(namesrv) as admin:
            found = await admin.quotas()
        rows = [_row(broker, quota) for broker, quotas in found.items() for quota in quotas]
        show(output, "Quotas", rows, COLUMNS)
        return ExitCode.OK

    return await repeated(look, watch)


def _row(broker: str, quota: QuotaInfo) -> dict[str, Any]:
    return {
        "broker": broker,
        "kind": quota.kind,
        "name": quota.name or DEFAULT_NAME,
        "sends": _rates(quota.sent_messages_per_s, quota.sent_bytes_per_s),
        "receives": _rates(quota.received_messages_per_s, quota.received_bytes_per_s),
        "connections": quota.connections,
        "refused": quota.refused,
        "throttled_ms": quota.throttled_ms,
        "open_connections": quota.open_connections,
        **_limits(quota),
    }


def _rates(messages: int | None, size_bytes: int | None) -> str | None:
    parts = []
    if messages is not None:
        parts.append(f"{messages:,}/s")
    if size_bytes is not None:
        parts.append(f"{size_bytes:,} B/s")
    return " ".join(parts) or None


def _limits(quota: QuotaInfo) -> dict[str, int | None]:
    return {
        "sent_messages_per_s": quota.sent_messages_per_s,
        "sent_bytes_per_s": quota.sent_bytes_per_s,
        "received_messages_per_s": quota.received_messages_per_s,
        "received_bytes_per_s": quota.received_bytes_per_s,
        "connections": quota.connections,
    }


@app.command(name="set")
async def set_quota(
    *,
    account: Account = None,
    client: Client = None,
    default: Default = None,
    send_messages: Limit = None,
    send_bytes: Limit = None,
    receive_messages: Limit = None,
    receive_bytes: Limit = None,
    connections: Limit = None,
    unlimited: Annotated[
        bool, Parameter(negative="", help="No limit but those that are given: not the default.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
) -> int:
    """Change limits of a quota in every broker group; what is not given stays.

    Rates are per second, and each broker counts for itself.
    """
    kind, name = _named(account, client, default)
    given = {
        name: text
        for name, text in {
            "sent_messages_per_s": send_messages,
            "sent_bytes_per_s": send_bytes,
            "received_messages_per_s": receive_messages,
            "received_bytes_per_s": receive_bytes,
            "connections": connections,
        }.items()
        if text is not None
    }
    limits = {name: _number(name, text) for name, text in given.items()}
    if not limits and not unlimited:
        raise CliError("nothing to set: give a limit, or --unlimited", exit_code=ExitCode.USAGE)
    async with _admin(namesrv) as admin:
        for broker, quotas in (await admin.quotas()).items():
            current: dict[str, int | None] = {}
            for quota in quotas:
                if (quota.kind, quota.name) == (kind, name) and not unlimited:
                    current = _limits(quota)
            merged: Mapping[str, Any] = {**current, **limits}
            await admin.set_quota(
                account=name if kind == "account" else None,
                client=name if kind == "client" else None,
                **merged,
                broker_names=(broker,),
            )
    return ExitCode.OK


@app.command(name="rm")
async def remove_quota(
    *,
    account: Account = None,
    client: Client = None,
    default: Default = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
) -> int:
    """Remove a quota in every broker group; then the default counts."""
    kind, name = _named(account, client, default)
    async with _admin(namesrv) as admin:
        there = [
            broker
            for broker, quotas in (await admin.quotas()).items()
            if any((quota.kind, quota.name) == (kind, name) for quota in quotas)
        ]
        if not there:
            raise CliError(
                f"there is no quota of {kind} {name or DEFAULT_NAME}",
                next_step="see dledger quota ls",
            )
        await admin.delete_quota(
            account=name if kind == "account" else None,
            client=name if kind == "client" else None,
            broker_names=tuple(there),
        )
    note(f"removed in {', '.join(there)}")
    return ExitCode.OK


def _named(account: str | None, client: str | None, default: str | None) -> tuple[str, str]:
    """Return kind and name of the one quota that is named; an empty name is the default."""
    given = (("account", account), ("client", client))
    found = [(kind, name) for kind, name in given if name is not None]
    if len(found) + (default is not None) != 1 or any(not name for _, name in found):
        raise CliError("name one of --account, --client and --default", exit_code=ExitCode.USAGE)
    return found[0] if default is None else (default, "")


def _number(name: str, text: str) -> int | None:
    if text == NO_LIMIT:
        return None
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        number = 0
    if number < 1:
        raise CliError(
            f"{name.replace('_', ' ')}: {text[:32]!r} is no number from 1 on, and not"
            f" {NO_LIMIT}; nothing was changed",
            exit_code=ExitCode.USAGE,
        )
    return number
