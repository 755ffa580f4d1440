"""``dledger group``: consumer groups, their members, lag and offsets; ``dledger producer``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import trio
from cyclopts import App, Parameter

from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    RowsOutput,
    addresses,
    note,
    print_json,
    show,
)
from dledger.state.names import SYSTEM_GROUPS

if TYPE_CHECKING:
    from client.admin.admin import Admin
    from client.admin.groups import OffsetMove
    from client.core.route import MessageQueue
    from remoting.protocol.bodies import ConsumerConnection, OffsetWrapper

app = App(name="group", help="Consumer groups: members, lag, offsets.", backend="trio")
producer_app = App(name="producer", help="Producers that are connected.", backend="trio")

ASKED_AT_ONCE = 16
"""Groups that are asked after at a time."""

MOVE_COLUMNS = ("broker", "queue", "min_offset", "max_offset", "before", "after", "moves_by")

Yes = Annotated[bool, Parameter(help="Do it; without it nothing is changed.")]


@app.command
async def ls(
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    system: Annotated[bool, Parameter(help="Groups of the broker itself too.")] = False,
    output: RowsOutput = "table",
) -> int:
    """List consumer groups with members and lag."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        admin = Admin(client)
        lags = await admin.lags()
        known = {*await admin.subscription_groups(), *lags}
        names = sorted(name for name in known if system or name not in SYSTEM_GROUPS)
        connections = await _connections(admin, names)
    rows = [group_row(name, connections[name], lags.get(name, {})) for name in names]
    show(output, "", rows, ("group", "members", "model", "topics", "lag"))
    return ExitCode.OK


async def _connections(admin: Admin, names: list[str]) -> dict[str, ConsumerConnection | None]:
    found: dict[str, ConsumerConnection | None] = {}
    limiter = trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask(name: str) -> None:
        async with limiter:
            found[name] = await admin.consumer_connection(name)

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(ask, name)
    return found


def group_row(
    name: str, connection: ConsumerConnection | None, lags: Mapping[str, int]
) -> dict[str, Any]:
    """Return what is shown of a group. Pure.

    Args:
        lags: Messages still to come, by topic.
    """
    topics = set(lags) | set(connection.subscription_table if connection is not None else ())
    return {
        "group": name,
        "members": 0 if connection is None else len(connection.connection_set),
        "model": None if connection is None else connection.message_model,
        "topics": len([topic for topic in topics if not topic.startswith("%RETRY%")]),
        "lag": sum(lags.values()),
    }


@app.command
async def info(
    group: str, /, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Show members, subscriptions, and offset and lag of each queue."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        admin = Admin(client)
        await _require_known(admin, group)
        connection = await admin.consumer_connection(group)
        progress = await admin.group_progress(group)
        owners = await admin.queue_owners(group)
    found = group_info(group, connection, progress, owners)
    if output == "json":
        print_json(found)
        return ExitCode.OK
    note(f"{group}: {len(found['members'])} members, {found['lag']} messages behind")
    show(output, "Members", found["members"], ("client_id", "address", "language", "version"))
    show(output, "Subscriptions", found["subscriptions"], ("topic", "expression", "type"))
    columns = ("topic", "broker", "queue", "consumed", "end", "lag", "last_consumed", "member")
    show(output, "Queues", found["queues"], columns)
    return ExitCode.OK


async def _require_known(admin: Admin, group: str) -> None:
    """Refuse a group without a configuration, without members and without offsets.

    Raises:
        CliError: No broker knows it: most often its name is misspelt; nothing was changed.
    """
    if group in await admin.subscription_groups():
        return
    if await admin.consumer_connection(group) is None and not await admin.group_progress(group):
        raise CliError(f"no broker knows group {group}", next_step="see dledger group ls")


def group_info(
    group: str,
    connection: ConsumerConnection | None,
    progress: Mapping[MessageQueue, OffsetWrapper],
    owners: Mapping[MessageQueue, str],
) -> dict[str, Any]:
    """Return everything that is shown of one group. Pure."""
    queues = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "consumed": said.consumer_offset,
            "end": said.broker_offset,
            "lag": max(0, said.broker_offset - said.consumer_offset),
            "last_consumed": time_text(said.last_timestamp),
            "member": owners.get(queue),
        }
        for queue, said in sorted(progress.items())
    ]
    table = {} if connection is None else connection.subscription_table
    return {
        "group": group,
        "consume_type": None if connection is None else connection.consume_type,
        "message_model": None if connection is None else connection.message_model,
        "members": [
            {
                "client_id": member.client_id,
                "address": member.client_addr,
                "language": member.language,
                "version": member.version,
            }
            for member in (() if connection is None else connection.connection_set)
        ],
        "subscriptions": [
            {
                "topic": topic,
                "expression": data.sub_string,
                "type": data.expression_type or "TAG",
            }
            for topic, data in sorted(table.items())
        ],
        "lag": sum(row["lag"] for row in queues),
        "queues": queues,
    }


def time_text(at_ms: int) -> str | None:
    """Return a time as people read it; None where there is none."""
    if at_ms <= 0:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


# -------------------------------------------------------------------------------- other offsets


@app.command
async def reset(
    group: str,
    topic: str,
    /,
    *,
    to_first: Annotated[bool, Parameter(help="To the first message that is kept.")] = False,
    to_last: Annotated[bool, Parameter(help="To the end: what waits is skipped.")] = False,
    to_time: Annotated[
        str, Parameter(help="To the first message stored then: ISO 8601, or ms since the epoch.")
    ] = "",
    yes: Yes = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Let a group go on elsewhere in a topic, whether its consumers run or not.

    Shows where each queue stands and where it would go on; --yes does it. The broker
    notifies running consumers; where none is connected it stores the offsets.
    """
    return await _reset(group, topic, reset_time(to_first, to_last, to_time), yes, namesrv, output)


@app.command
async def skip(
    group: str,
    topic: str,
    /,
    *,
    yes: Yes = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Skip what waits for a group in a topic: reset --to-last."""
    return await _reset(group, topic, reset_time(False, True, ""), yes, namesrv, output)


def reset_time(to_first: bool, to_last: bool, to_time: str) -> int:
    """Return the time to reset to, in ms since the epoch: 0 the first, -1 the end.

    Raises:
        CliError: None of the three was given, or more than one, or no time; a usage error.
    """
    from dledger.cli.message_command import _time_ms

    if to_first + to_last + bool(to_time) != 1:
        raise CliError("give one of --to-first, --to-last, --to-time T", exit_code=ExitCode.USAGE)
    if to_last:
        return -1
    return 0 if to_first else _time_ms(to_time, "--to-time", 0)


async def _reset(
    group: str, topic: str, timestamp_ms: int, yes: bool, namesrv: str, output: Output
) -> int:
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        admin = Admin(client)
        await _require_known(admin, group)
        moves = await admin.plan_offset_reset(group, topic, timestamp_ms)
        rows = move_rows(moves)
        if output == "table":
            show(output, f"{group} in {topic}", rows, MOVE_COLUMNS)
        if not yes:
            return _only_planned(output, rows, f"{group} was not changed; --yes does it")
        done = await admin.reset_offsets(group, topic, timestamp_ms, moves)
    missing = [queue for queue in moves if queue not in done.told and queue not in done.stored]
    for queue, row in zip(moves, rows, strict=True):
        row["done"] = (
            "told" if queue in done.told else "stored" if queue in done.stored else "not_stored"
        )
        row["after"] = done.told.get(queue, row["after"])
    if output == "json":
        print_json({"changed": True, "queues": rows})
    else:
        note(f"{len(done.told)} queues: running consumers are notified; they store the offsets")
        note(f"{len(done.stored)} queues: no consumer is connected; the offsets are stored")
    if missing:
        raise CliError(
            f"{len(missing)} queues have their old offsets still: {missing[0]}",
            next_step="do it again",
        )
    return ExitCode.OK


def _only_planned(output: Output, rows: list[dict[str, Any]], text: str) -> int:
    if output == "json":
        print_json({"changed": False, "queues": rows})
    else:
        note(text)
    return ExitCode.OK


def move_rows(moves: Mapping[MessageQueue, OffsetMove]) -> list[dict[str, Any]]:
    """Return what is shown of a reset, queue by queue. Pure."""
    return [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "min_offset": move.min_offset,
            "max_offset": move.max_offset,
            "before": move.before,
            "after": move.after,
            "moves_by": move.after - move.before,
        }
        for queue, move in moves.items()
    ]


@app.command
async def clone(
    source: str,
    target: str,
    /,
    *,
    topic: Annotated[str | None, Parameter(help="In this topic; in all it has otherwise.")] = None,
    yes: Yes = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Let group TARGET begin where group SOURCE stands; TARGET should have no consumers running."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        admin = Admin(client)
        progress = await admin.group_progress(source)
        before = await admin.group_progress(target)
        rows = clone_rows(progress, before, topic)
        if not rows:
            raise CliError(
                f"{source} has no offsets{f' in {topic}' if topic else ''}",
                next_step=f"see dledger group info {source}",
            )
        if output == "table":
            columns = ("topic", "broker", "queue", "before", "after")
            show(output, f"{target} as {source}", rows, columns)
        if not yes:
            return _only_planned(output, rows, f"{target} was not changed; --yes does it")
        running = await admin.consumer_connection(target)
        if running is not None:
            raise CliError(
                f"{target} has {len(running.connection_set)} consumers running, which would store"
                " their own offsets again; nothing was changed",
                next_step="stop them first",
            )
        await admin.clone_offsets(source, target, topic=topic)
    if output == "json":
        print_json({"changed": True, "queues": rows})
    else:
        note(f"{target} begins where {source} stands")
    return ExitCode.OK


def clone_rows(
    source: Mapping[MessageQueue, OffsetWrapper],
    target: Mapping[MessageQueue, OffsetWrapper],
    topic: str | None,
) -> list[dict[str, Any]]:
    """Return what is shown of a clone, queue by queue. Pure."""
    return [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "before": target[queue].consumer_offset if queue in target else 0,
            "after": said.consumer_offset,
        }
        for queue, said in sorted(source.items())
        if topic is None or queue.topic == topic
    ]


@producer_app.command(name="ls")
async def list_producers(
    group: Annotated[
        str | None, Parameter(help="Of this producer group; of all otherwise.")
    ] = None,
    /,
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: RowsOutput = "table",
) -> int:
    """List connected producers."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        found = await Admin(client).producers()
    if group is not None and group not in found:
        raise CliError(f"no producer of {group} is connected", next_step="see dledger producer ls")
    rows = [
        {
            "group": name,
            "client_id": producer.client_id,
            "address": producer.remote_ip,
            "language": producer.language,
            "version": producer.version,
            "last_heard": time_text(producer.last_update_timestamp),
        }
        for name, producers in found.items()
        for producer in producers
        if group in (None, name)
    ]
    columns = ("group", "client_id", "address", "language", "version", "last_heard")
    show(output, "", rows, columns)
    return ExitCode.OK
