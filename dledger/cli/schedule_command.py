"""``dledger schedule``: messages that the broker sends again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.cli.message_command import properties_of, time_ms
from dledger.cli.watch import Watch, repeated
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    addresses,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.client.admin.schedules import SchedulePut
    from dledger.remoting.protocol.schedule_bodies import ScheduleInfo

app = App(
    name="schedule",
    help="Send messages again and again, as cron does; list, pause, remove.",
    backend="trio",
)

Name = Annotated[str, Parameter(help="Name of the schedule.")]
Names = Annotated[str, Parameter(help="Names of schedules.")]

COLUMNS: Final = ("schedule", "next_due", "fired", "missed", "state")
"""What fits into 80 columns; JSON has all."""

LOCAL_CHARS: Final = len("2027-01-15T09:00:00")


@app.command
async def add(
    name: Name,
    expression: Annotated[
        str, Parameter(help="Cron: '0 6 * * mon-fri', @daily; or an interval: '@every 30s'.")
    ],
    body: Annotated[str | None, Parameter(help="Body of each message; or --file.")] = None,
    /,
    *,
    topic: Annotated[str, Parameter(name=["--topic", "-t"], help="Name of the topic.")],
    file: Annotated[Path | None, Parameter(help="File with the body.")] = None,
    time_zone: Annotated[
        str, Parameter(help="Of a cron expression, such as Europe/Berlin.")
    ] = "UTC",
    begin: Annotated[
        str, Parameter(help="Nothing before this time; an interval counts from there.")
    ] = "",
    end: Annotated[str, Parameter(help="Nothing after this time.")] = "",
    tag: Annotated[str, Parameter(help="Tag that consumers filter by.")] = "",
    key: Annotated[str, Parameter(help="Index keys, separated by blanks.")] = "",
    property_: Annotated[
        tuple[str, ...] | None, Parameter(name="--property", help="name=value; may be repeated.")
    ] = None,
    message_group: Annotated[
        str, Parameter(help="Messages of one message group go to one queue.")
    ] = "",
    queue: Annotated[int, Parameter(help="Queue id; without it queues take turns.")] = -1,
    paused: Annotated[bool, Parameter(help="Send nothing until dledger schedule resume.")] = False,
    broker: Annotated[
        str | None,
        Parameter(help="Broker group; without it the one with that schedule, or with the topic."),
    ] = None,
    dry_run: Annotated[
        bool, Parameter(help="Check everything, print the next instants, change nothing.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Send a message at each instant of a cron expression or an interval; print the next ones.

    A schedule of that name is replaced. Times are ISO 8601, UTC where they name no zone.
    """
    from dledger.client.core.errors import NoRouteError
    from dledger.client.core.message import Message

    if (body is None) == (file is None):
        raise CliError("give a body or --file", exit_code=ExitCode.USAGE)
    message = Message(
        topic,
        body.encode() if body is not None else _read(file),
        tags=tag,
        keys=key,
        properties=properties_of(property_ or ()),
    )
    begin_ms, end_ms = time_ms(begin, "--begin", 0), time_ms(end, "--end", 0)
    async with _admin(namesrv) as admin:
        try:
            put = await admin.put_schedule(
                name,
                expression,
                message,
                time_zone=time_zone,
                message_group=message_group,
                queue_id=queue,
                begin_ms=begin_ms,
                end_ms=end_ms,
                paused=paused,
                broker_name=broker,
                dry_run=dry_run,
            )
        except NoRouteError as error:
            raise CliError(
                f"no route to topic {topic}; nothing was changed",
                next_step=f"make it: dledger topic create {topic}",
            ) from error
    _show_put(name, put, time_zone, dry_run, output)
    return ExitCode.OK


def _read(file: Path | None) -> bytes:
    return b"" if file is None else file.read_bytes()


def _show_put(name: str, put: SchedulePut, zone: str, dry_run: bool, output: Output) -> None:
    from dledger.schedule_texts import instant_text

    coming = [instant_text(instant, zone) for instant in put.coming_ms]
    if output == "json":
        print_json({"name": name, "broker": put.broker_name, "dry_run": dry_run, "coming": coming})
        return
    show(output, "", [{"next instants": instant} for instant in coming], ("next instants",))
    note(
        f"{name}: nothing was changed; without --dry-run it is stored in {put.broker_name}"
        if dry_run
        else f"{name} is stored in {put.broker_name}"
    )


@app.command
async def ls(
    name: Annotated[str | None, Parameter(help="This one only, with its message.")] = None,
    /,
    *,
    watch: Watch = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """List schedules: when each was and is due, messages sent, instants missed."""

    async def look() -> int:
        async with _admin(namesrv) as admin:
            if name is not None:
                return _show_one(name, await admin.schedule(name), output)
            groups = await admin.schedules()
        rows = [schedule_row(broker, info) for broker, infos in groups.items() for info in infos]
        rows.sort(key=_place)
        if output == "table":
            rows = [schedule_line(row) for row in rows]
        show(output, "schedules", rows, COLUMNS)
        return ExitCode.OK

    return await repeated(look, watch)


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["name"], row["broker"]


def _show_one(name: str, found: tuple[str, ScheduleInfo] | None, output: Output) -> int:
    if found is None:
        raise CliError(f"there is no schedule {name}", next_step="see dledger schedule ls")
    broker, info = found
    row = schedule_row(broker, info) | {
        "properties": info.properties,
        "body": info.body.decode(errors="replace"),
    }
    if output == "json":
        print_json(row)
    else:
        fields = [{"field": field, "value": value} for field, value in row.items()]
        show(output, name, fields, ("field", "value"))
    return ExitCode.OK


def schedule_row(broker: str, info: ScheduleInfo) -> dict[str, Any]:
    """Return what is shown of a schedule; times in its own zone. Pure."""
    from dledger.schedule_texts import instant_text, state_text

    return {
        "name": info.name,
        "broker": broker,
        "topic": info.topic,
        "expression": info.expression,
        "time_zone": info.time_zone,
        "state": state_text(info),
        "last_due": instant_text(info.last_ms, info.time_zone),
        "next_due": instant_text(info.next_ms, info.time_zone),
        "fired": info.fired,
        "missed": info.missed,
        "begin": instant_text(info.begin_ms, info.time_zone),
        "end": instant_text(info.end_ms, info.time_zone),
        "queue": None if info.queue_id < 0 else info.queue_id,
        "body_bytes": info.body_bytes,
    }


def schedule_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table shows of a schedule: two lines in its first columns. Pure."""
    due = row["next_due"]
    return {
        "schedule": f"{row['name']}\n{row['expression']}",
        "next_due": due and f"{due[:LOCAL_CHARS]}\n{row['time_zone']}",
        "fired": row["fired"],
        "missed": row["missed"],
        "state": row["state"],
    }


@app.command
async def rm(*names: Names, namesrv: Namesrv = DEFAULT_NAMESRV) -> int:
    """Remove schedules; messages that were sent stay."""
    async with _admin(namesrv) as admin:
        return await _each(names, admin.delete_schedule, "is removed from")


@app.command
async def pause(*names: Names, namesrv: Namesrv = DEFAULT_NAMESRV) -> int:
    """Let schedules rest; what is due meanwhile is not sent."""
    async with _admin(namesrv) as admin:
        return await _each(names, admin.pause_schedule, "is paused in")


@app.command
async def resume(*names: Names, namesrv: Namesrv = DEFAULT_NAMESRV) -> int:
    """Let schedules go on, with the first instant from now on."""
    async with _admin(namesrv) as admin:
        return await _each(names, admin.resume_schedule, "goes on in")


async def _each(names: Sequence[str], change: Callable[[str], Awaitable[str]], outcome: str) -> int:
    """Change schedules one after the other, and print what each is now.

    Args:
        change: Changes the one that is named, and returns its broker group.
        outcome: Stands between the name of the schedule and that of the group.
    Raises:
        CliError: No schedule is named; a usage error.
        MQError: A change failed; those before it are done, and printed.
    """
    if not names:
        raise CliError("name a schedule", exit_code=ExitCode.USAGE)
    for name in names:
        note(f"{name} {outcome} {await change(name)}")
    return ExitCode.OK


@asynccontextmanager
async def _admin(namesrv: str) -> AsyncIterator[Admin]:
    from dledger.cli.ask_cluster import open_client
    from dledger.client.admin.admin import Admin

    async with open_client(addresses(namesrv)) as client:
        yield Admin(client)
