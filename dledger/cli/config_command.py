"""``dledger config``: settings of daemons that run: look, change, compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from dledger.cli.commands import broker_addresses, change_each, with_admin
from dledger.output import (
    CliError,
    ExitCode,
    Output,
    Yes,
    note,
    print_json,
    print_table,
    show,
)
from dledger.settings.text import OWN_KEYS

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin

app = App(name="config", help="Show and change settings of running daemons.", backend="trio")

Brokers = Annotated[
    tuple[str, ...] | None,
    Parameter(name=["--broker", "-b"], help="Broker, host:port; may be repeated. Without it: all."),
]
NameServers = Annotated[
    bool, Parameter(name="--name-servers", help="The NameServers of --namesrv instead of brokers.")
]


@app.command
@with_admin
async def get(
    admin: Admin,
    *keys: Annotated[str, Parameter(help="Names of settings; all otherwise.")],
    broker: Brokers = None,
    name_servers: NameServers = False,
    output: Output = "table",
) -> None:
    """Show the current settings of all brokers, or of some."""
    found = await settings_of(admin, broker, name_servers)
    rows = [
        {"address": address, "key": key, "value": value}
        for address, settings in found.items()
        for key, value in sorted(settings.items())
        if not keys or key in keys
    ]
    unknown = [key for key in keys if not any(row["key"] == key for row in rows)]
    if unknown:
        raise CliError(f"no daemon has a setting {', '.join(unknown)}", exit_code=ExitCode.USAGE)
    show(output, "Settings", rows, ("address", "key", "value"))


@app.command(name="set")
@with_admin
async def set_(
    admin: Admin,
    *assignments: Annotated[str, Parameter(help="KEY=VALUE, in RocketMQ's names or table.name.")],
    broker: Brokers = None,
    name_servers: NameServers = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Change settings of all brokers, or of some, until each stops.

    Each broker takes all of them or none. One that refuses does not undo what others took. Where
    less is kept afterwards the messages that would go are shown first; --yes does it.
    """
    changes: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise CliError(f"{assignment!r} is not KEY=VALUE", exit_code=ExitCode.USAGE)
        changes[key] = value
    if not changes:
        raise CliError("nothing to change: give KEY=VALUE", exit_code=ExitCode.USAGE)
    failed: list[str] = []

    async def change(address: str, is_confirmed: bool) -> str:
        from dledger.client.core.errors import ClientError, ConfirmationNeededError

        try:
            if name_servers:
                remark = await admin.change_name_server_settings(address, changes)
            else:
                remark = await admin.change_broker_settings(
                    address, changes, gives_up_messages=is_confirmed
                )
        except ConfirmationNeededError:
            raise
        except ClientError as error:
            failed.append(address)
            return f"error: {error}"
        if remark:
            note(f"{address}: {remark}")
        return f"{address}: changed"

    targets = await _targets(admin, broker, name_servers)
    shown = await change_each(targets, change, yes=yes, output=output)
    if shown.left:
        note(f"{', '.join(shown.left)}: not changed; --yes does it")
    return ExitCode.FAILED if failed else ExitCode.OK


@app.command
@with_admin
async def diff(
    admin: Admin,
    *,
    broker: Brokers = None,
    name_servers: NameServers = False,
    everything: Annotated[
        bool,
        Parameter(name="--all", help="Show addresses and paths too, which differ for each daemon."),
    ] = False,
    output: Output = "table",
) -> int:
    """Show settings that differ between daemons; exit 1 if there are any."""
    found = await settings_of(admin, broker, name_servers)
    rows = differing(found, with_own=everything)
    if output == "json":
        print_json(rows)
    else:
        print_table(
            "Settings that differ",
            ["key", *found],
            [[key, *(values[address] for address in found)] for key, values in rows.items()],
        )
    return ExitCode.FAILED if rows else ExitCode.OK


def differing(
    found: Mapping[str, Mapping[str, str]], *, with_own: bool
) -> dict[str, dict[str, str | None]]:
    """Return key → address → value for every key that two daemons do not agree on. Pure.

    *with_own*: also keys that are meant to differ.
    """
    keys = sorted({key for settings in found.values() for key in settings})
    rows: dict[str, dict[str, str | None]] = {}
    for key in keys:
        values = {address: settings.get(key) for address, settings in found.items()}
        if len(set(values.values())) > 1 and (with_own or key not in OWN_KEYS):
            rows[key] = values
    return rows


async def _targets(admin: Admin, brokers: tuple[str, ...] | None, name_servers: bool) -> list[str]:
    if name_servers:
        return list(admin.name_servers)
    if brokers:
        return list(dict.fromkeys(_address(broker) for broker in brokers))
    return broker_addresses(await admin.cluster_info())


def _address(broker: str) -> str:
    from dledger.settings.schema import parse_addresses

    try:
        (address,) = parse_addresses(broker)
    except ValueError:  # also where it is none, or several
        raise CliError(f"--broker: {broker!r} is not host:port", exit_code=ExitCode.USAGE) from None
    return address


async def settings_of(
    admin: Admin, brokers: tuple[str, ...] | None = None, name_servers: bool = False
) -> dict[str, dict[str, str]]:
    """Return address → key → value of every daemon asked.

    Raises ClientError: one does not answer, or refuses.
    """
    from dledger.client.admin.daemons import ask_each

    ask = admin.name_server_settings if name_servers else admin.broker_settings
    return await ask_each(ask, await _targets(admin, brokers, name_servers))
