"""What commands that ask a cluster share: a client, lists that repeat, changes to confirm."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar

from cyclopts import Parameter

from dledger.commitlog.errors import InvariantBroken, MQError
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    RowsOutput,
    Wide,
    addresses,
    leaves_of,
    note,
    print_json,
    show,
    utc,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.client.core.client_instance import ClientInstance
    from dledger.remoting.protocol.bodies import ClusterInfo
    from dledger.remoting.protocol.own_fields import GivenUp

Watch = Annotated[
    float | None,
    Parameter(name="--watch", help="Repeat, with this many seconds between, until Ctrl-C."),
]

CLEAR: Final = "\x1b[H\x1b[2J"


async def repeated(
    look: Callable[[], Awaitable[int]],
    every_s: float | None,
    most: int | None = None,
    *,
    option: str = "--watch",
) -> int:
    """Look once, or again every *every_s* seconds; return the status of the last look.

    Args:
        most: Calls of *look* at most; None: until cancelled.
        option: Names the interval.
    Raises:
        CliError: What *look* raises the first time, and an interval that is none; later failures
            of it are shown, since a cluster that is watched may be away for a moment.
    """
    import trio

    from dledger.output import note

    if every_s is not None and not every_s > 0:
        raise CliError(f"{option}: above 0", exit_code=ExitCode.USAGE)
    status, done = await look(), 1
    while every_s is not None and (most is None or done < most):
        await trio.sleep(every_s)
        if sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        try:
            status = await look()
        except (MQError, ExceptionGroup) as error:
            first = known_error(error)
            note(f"error: {first}")
            status = first.exit_code if isinstance(first, CliError) else ExitCode.FAILED
        done += 1
    return status


def known_error(error: Exception) -> MQError:
    """Return what a look failed with. Raises *error*, where part of it is a bug."""
    leaves = leaves_of(error)
    found = [each for each in leaves if isinstance(each, MQError)]
    if len(found) < len(leaves) or any(isinstance(each, InvariantBroken) for each in found):
        raise error
    return found[0]


P = ParamSpec("P")
T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]


def open_client(namesrvs: Sequence[str]) -> ClientInstance:
    """Return a client instance of this process; enter it with ``async with``.

    Standard output is the command's: what the SDK logs goes to standard error, from warnings on.
    """
    from dledger.client.connect import connect
    from dledger.remoting.log import log_warnings_as_text

    log_warnings_as_text()
    return connect(namesrvs)


@asynccontextmanager
async def open_admin(namesrv: str | Sequence[str]) -> AsyncIterator[Admin]:
    """Give administration of the cluster behind NameServers.

    Raises CliError: the block names a topic that no NameServer knows; or *namesrv* is no address.
    """
    from dledger.client.admin.admin import Admin
    from dledger.client.core.errors import NoRouteError

    async with open_client(addresses(namesrv) if isinstance(namesrv, str) else namesrv) as client:
        try:
            yield Admin(client)
        except NoRouteError as error:
            raise CliError(f"no route: {error}", next_step="see dledger topic ls") from error


def broker_addresses(info: ClusterInfo) -> list[str]:
    """Return the address of every broker that a NameServer knows, group by group. Pure."""
    return [
        address
        for _, group in sorted(info.broker_addr_table.items())
        for _, address in sorted(group.broker_addrs.items())
    ]


# -------------------------------------------------------------------------------------- lists


def with_admin(
    function: Callable[Concatenate[Admin, P], Awaitable[T]],
) -> Callable[..., Awaitable[T]]:
    """Make a command of a function that asks an `Admin`, its first argument: adds --namesrv."""

    async def command(*args: Any, namesrv: str = DEFAULT_NAMESRV, **options: Any) -> T:
        async with open_admin(namesrv) as admin:
            return await function(admin, *args, **options)

    return with_options(command, function, NAMESRV)


def listing(
    columns: Sequence[str], wide_columns: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[Admin, P], Awaitable[Rows]]], Callable[..., Awaitable[int]]]:
    """Make a command of a function that returns rows: adds --namesrv, --watch and --output."""

    def decorated(
        rows_of: Callable[Concatenate[Admin, P], Awaitable[Rows]],
    ) -> Callable[..., Awaitable[int]]:
        async def command(
            *args: Any,
            wide: bool = False,
            watch: float | None = None,
            namesrv: str = DEFAULT_NAMESRV,
            output: RowsOutput = "table",
            **options: Any,
        ) -> int:
            async def look() -> int:
                async with open_admin(namesrv) as admin:
                    rows = await rows_of(admin, *args, **options)
                show(output, "", rows, wide_columns if wide else columns)
                return ExitCode.OK

            return await repeated(look, watch)

        added = [("watch", Watch, None), NAMESRV, ("output", RowsOutput, "table")]
        return with_options(command, rows_of, *[("wide", Wide, False)][: len(wide_columns)], *added)

    return decorated


NAMESRV: Final = ("namesrv", Namesrv, DEFAULT_NAMESRV)
"""An option that a command gets; see `with_options`."""


def with_options(
    command: Callable[..., Awaitable[T]],
    function: Callable[..., object],
    *added: tuple[str, Any, Any],
) -> Callable[..., Awaitable[T]]:
    """Return *command* with the options of *function* behind its first argument, and with *added*.

    Each of these has a name, a type and a default. What is printed is the last option.
    """
    _, *own = inspect.signature(function).parameters.values()
    own = [one.replace(annotation=eval(one.annotation, function.__globals__)) for one in own]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own += [
        inspect.Parameter(name, keyword, default=default, annotation=hint)
        for name, hint, default in added
    ]
    own.sort(key=lambda one: one.name == "output")
    functools.update_wrapper(command, function)
    del command.__wrapped__  # type: ignore[attr-defined]  # the options are the command's
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in own}
    return command


# ------------------------------------------------------------------ what a change gives up


@dataclass(frozen=True, slots=True)
class Changed:
    """What `change_each` did."""

    gives_up: bool
    left: list[str]


async def change_each(
    names: Iterable[str],
    change: Callable[[str, bool], Awaitable[str]],
    *,
    yes: bool,
    output: Output,
) -> Changed:
    """Change where nothing is lost by it, elsewhere with *yes*; show what goes by that."""
    from dledger.client.core.errors import ConfirmationNeededError

    waiting: dict[str, GivenUp] = {}
    for name in names:
        try:
            said = await change(name, False)
        except ConfirmationNeededError as error:
            waiting[name] = error.given_up
        else:
            if said:
                note(said)
    show_given_up(waiting, output)
    if not yes:
        return Changed(bool(waiting), list(waiting))
    for name in waiting:
        if said := await change(name, True):
            note(said)
    return Changed(bool(waiting), [])


def rows_of(found: Mapping[str, GivenUp]) -> list[dict[str, Any]]:
    """Return broker, topic and messages that would go, one row for each topic. Pure."""
    rows: list[dict[str, Any]] = []
    for broker, lost in found.items():
        rows += [
            {"broker": broker, "topic": topic, "messages": count}
            for topic, count in lost.messages.items()
        ]
        if lost.other_topics:
            others = f"({lost.other_topics} more)"
            rows.append({"broker": broker, "topic": others, "messages": lost.other_messages})
    return rows


def show_given_up(found: Mapping[str, GivenUp], output: Output) -> None:
    """Print what would go, by broker."""
    if not found:
        return
    if output == "json":
        print_json(dict(found))
        return
    show(output, "Would be given up", rows_of(found), ("broker", "topic", "messages"))
    for broker, lost in found.items():
        newest = ""
        if lost.newest_ms:
            newest = f"; stored up to {utc(lost.newest_ms, to='seconds')}"
        uncounted = ""
        if lost.uncounted_queues:
            uncounted = f"; {lost.uncounted_queues} queues are not counted"
        note(f"{broker}: {lost}{newest}{uncounted}")
