"""``dledger config``: settings of daemons that run: look, change, compare."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    Yes,
    addresses,
    note,
    print_json,
    print_table,
    show,
)
from dledger.own_keys import OWN_KEYS
from dledger.remoting.protocol.codes import RequestCode

if TYPE_CHECKING:
    from dledger.remoting.protocol.own_fields import GivenUp

app = App(name="config", help="Show and change settings of running daemons.", backend="trio")

Brokers = Annotated[
    tuple[str, ...] | None,
    Parameter(name=["--broker", "-b"], help="Broker, host:port; may be repeated. Without it: all."),
]
NameServers = Annotated[
    bool,
    Parameter(name="--name-servers", help="The NameServers of --namesrv instead of brokers."),
]

GET = {False: RequestCode.GET_BROKER_CONFIG, True: RequestCode.GET_NAMESRV_CONFIG}
UPDATE = {False: RequestCode.UPDATE_BROKER_CONFIG, True: RequestCode.UPDATE_NAMESRV_CONFIG}


@app.command
async def get(
    *keys: Annotated[str, Parameter(help="Names of settings; all otherwise.")],
    namesrv: Namesrv = DEFAULT_NAMESRV,
    broker: Brokers = None,
    name_servers: NameServers = False,
    output: Output = "table",
) -> int:
    """Show the current settings of all brokers, or of some."""
    found = await settings_of(namesrv, broker, name_servers)
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
    return ExitCode.OK


@app.command(name="set")
async def set_(
    *assignments: Annotated[str, Parameter(help="KEY=VALUE, in RocketMQ's names or table.name.")],
    namesrv: Namesrv = DEFAULT_NAMESRV,
    broker: Brokers = None,
    name_servers: NameServers = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Change settings of all brokers, or of some, until each stops.

    Each broker takes all of them or none. One that refuses does not undo what others took. Where
    less is kept afterwards the messages that would go are shown first; --yes does it.
    """
    from dledger.cli.ask_cluster import show_given_up
    from dledger.remoting.properties import format_properties

    changes: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise CliError(f"{assignment!r} is not KEY=VALUE", exit_code=ExitCode.USAGE)
        changes[key] = value
    if not changes:
        raise CliError("nothing to change: give KEY=VALUE", exit_code=ExitCode.USAGE)
    targets = await _targets(namesrv, broker, name_servers)
    body = format_properties(changes).encode()
    failed = 0
    waiting: dict[str, GivenUp] = {}
    for address in targets:
        try:
            lost = await _change(address, UPDATE[name_servers], body)
        except CliError as error:
            failed += 1
            note(f"error: {error}")
            continue
        if lost is None:
            note(f"{address}: changed")
        else:
            waiting[address] = lost
    show_given_up(waiting, output)
    if waiting and not yes:
        note(f"{', '.join(waiting)}: not changed; --yes does it")
        return ExitCode.FAILED if failed else ExitCode.OK
    for address in waiting:
        try:
            await _change(address, UPDATE[name_servers], body, is_confirmed=True)
        except CliError as error:
            failed += 1
            note(f"error: {error}")
        else:
            note(f"{address}: changed")
    return ExitCode.FAILED if failed else ExitCode.OK


async def _change(
    address: str, code: int, body: bytes, *, is_confirmed: bool = False
) -> GivenUp | None:
    """Change settings of one daemon; return what it wants confirmed first, having done nothing.

    Raises:
        CliError: It does not answer, or refuses.
    """
    from dledger.cli.ask_cluster import ask, confirmed, given_up_in, refused
    from dledger.remoting.protocol.codes import ResponseCode

    answer = await ask(address, code, confirmed() if is_confirmed else None, body)
    if answer.code == ResponseCode.SUCCESS:
        if answer.remark:
            note(f"{address}: {answer.remark}")
        return None
    lost = given_up_in(answer)
    if lost is None or is_confirmed:
        raise refused(address, answer)
    return lost


@app.command
async def diff(
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    broker: Brokers = None,
    name_servers: NameServers = False,
    everything: Annotated[
        bool,
        Parameter(name="--all", help="Show addresses and paths too, which differ for each daemon."),
    ] = False,
    output: Output = "table",
) -> int:
    """Show settings that differ between daemons; exit 1 if there are any."""
    found = await settings_of(namesrv, broker, name_servers)
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

    Args:
        found: Address → key → value.
        with_own: Also keys that are meant to differ.
    """
    keys = sorted({key for settings in found.values() for key in settings})
    rows: dict[str, dict[str, str | None]] = {}
    for key in keys:
        values = {address: settings.get(key) for address, settings in found.items()}
        if len(set(values.values())) > 1 and (with_own or key not in OWN_KEYS):
            rows[key] = values
    return rows


async def _targets(namesrv: str, brokers: tuple[str, ...] | None, name_servers: bool) -> list[str]:
    from dledger.cli.ask_cluster import groups_of

    if name_servers:
        return addresses(namesrv)
    if brokers:
        return list(dict.fromkeys(_address(broker) for broker in brokers))
    groups = await groups_of(addresses(namesrv), None)
    return [address for group in groups for _, address in sorted(group.broker_addrs.items())]


def _address(broker: str) -> str:
    from dledger.remoting.settings import parse_addresses

    try:
        (address,) = parse_addresses(broker)
    except ValueError:  # also where it is none, or several
        raise CliError(f"--broker: {broker!r} is not host:port", exit_code=ExitCode.USAGE) from None
    return address


async def settings_of(
    namesrv: str, brokers: tuple[str, ...] | None, name_servers: bool
) -> dict[str, dict[str, str]]:
    """Return address → key → value of every daemon asked.

    Raises:
        CliError: One does not answer, or refuses.
    """
    from dledger.cli.ask_cluster import all_of

    targets = await _targets(namesrv, brokers, name_servers)
    code = GET[name_servers]
    found = await all_of({address: partial(_ask_one, address, code) for address in targets})
    failures = [result for result in found.values() if isinstance(result, CliError)]
    if failures:
        raise failures[0]
    return {address: found[address] for address in targets}


async def _ask_one(address: str, code: int) -> dict[str, str] | CliError:
    from dledger.cli.ask_cluster import NoAnswerError, ask, refused
    from dledger.remoting.properties import read_properties
    from dledger.remoting.protocol.codes import ResponseCode

    try:
        answer = await ask(address, code)
    except NoAnswerError as error:
        return error
    if answer.code != ResponseCode.SUCCESS:
        return refused(address, answer)
    return read_properties(bytes(answer.body).decode())
