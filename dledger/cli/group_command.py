"""``dledger group``: consumer groups, their members, lag and offsets; ``dledger producer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dledger.cli.commands import Rows, listing, with_admin
from dledger.output import (
    CliError,
    ExitCode,
    GroupName,
    Output,
    TopicName,
    Wide,
    Yes,
    answer,
    note,
    print_json,
    show,
    utc,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.client.admin.groups import OffsetMove
    from dledger.client.core.route import MessageQueue
    from dledger.remoting.protocol.bodies import (
        ConsumerConnection,
        OffsetWrapper,
        SubscriptionGroupConfig,
    )

app = App(
    name="group", help="Show consumer groups: members, lag, offsets; move offsets.", backend="trio"
)
producers = App(name="producer", help="Show connected producers.", backend="trio")

TOPICS_SHOWN = 5
"""Topics of a group that an error names."""

QUEUE_COLUMNS = ("topic", "broker", "queue", "consumed", "end", "lag")
WIDE_QUEUE_COLUMNS = (*QUEUE_COLUMNS, "last_consumed", "member")
PRODUCER_COLUMNS = ("group", "client_id", "address", "language")
MOVE_COLUMNS = ("broker", "queue", "min_offset", "max_offset", "before", "after", "moves_by")


@app.command
@listing(("group", "members", "model", "topics", "lag"))
async def ls(
    admin: Admin,
    *,
    system: Annotated[bool, Parameter(help="Show the broker's own groups too.")] = False,
) -> Rows:
    """List consumer groups with members and lag."""
    from dledger.client.admin.daemons import ask_each
    from dledger.remoting.protocol.topic_names import SYSTEM_GROUPS

    lags = await admin.lags()
    known = {*await admin.subscription_groups(), *lags}
    names = sorted(name for name in known if system or name not in SYSTEM_GROUPS)
    connections = await ask_each(admin.consumer_connection, names)
    return [group_row(name, said, lags.get(name, {})) for name, said in connections.items()]


def group_row(
    name: str, connection: ConsumerConnection | None, lags: Mapping[str, int]
) -> dict[str, Any]:
    """Return what is shown of a group. Pure; *lags*: messages still to come, by topic."""
    topics = set(lags) | set(connection.subscription_table if connection is not None else ())
    return {
        "group": name,
        "members": 0 if connection is None else len(connection.connection_set),
        "model": None if connection is None else connection.message_model,
        "topics": len([topic for topic in topics if not topic.startswith("%RETRY%")]),
        "lag": sum(lags.values()),
    }


@app.command
@with_admin
async def info(
    admin: Admin, group: GroupName, /, *, wide: Wide = False, output: Output = "table"
) -> None:
    """Show members, subscriptions, and offset and lag of each queue."""
    config = await _require_known(admin, group)
    connection = await admin.consumer_connection(group)
    progress = await admin.group_progress(group)
    owners = await admin.queue_owners(group)
    found = group_info(group, connection, progress, owners)
    found["consume_enable"] = config is None or config.consume_enable
    if output == "json":
        print_json(found)
        return
    paused = "" if found["consume_enable"] else f"; paused, see dledger group resume {group}"
    note(f"{group}: {len(found['members'])} members, {found['lag']} messages behind{paused}")
    show(output, "Members", found["members"], ("client_id", "address", "language", "version"))
    show(output, "Subscriptions", found["subscriptions"], ("topic", "expression", "type"))
    show(output, "Queues", found["queues"], WIDE_QUEUE_COLUMNS if wide else QUEUE_COLUMNS)


async def _require_known(admin: Admin, group: str) -> SubscriptionGroupConfig | None:
    """Return the configuration of a group; None: it has members or offsets and no configuration.

    Raises CliError: no broker knows it: most often its name is misspelt; nothing was changed.
    """
    config = (await admin.subscription_groups()).get(group)
    if config is not None:
        return config
    if await admin.consumer_connection(group) is None and not await admin.group_progress(group):
        raise CliError(f"no broker knows group {group}", next_step="see dledger group ls")
    return None


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
            {"topic": topic, "expression": data.sub_string, "type": data.expression_type or "TAG"}
            for topic, data in sorted(table.items())
        ],
        "lag": sum(row["lag"] for row in queues),
        "queues": queues,
    }


def time_text(at_ms: int) -> str | None:
    """Return a time as people read it; None where there is none."""
    return utc(at_ms) if at_ms > 0 else None


# -------------------------------------------------------------------------------- other offsets


@app.command
@with_admin
async def reset(
    admin: Admin,
    group: GroupName,
    topic: TopicName,
    /,
    *,
    to_first: Annotated[
        bool,
        Parameter(
            name=["--to-first", "--earliest"], help="Move to the first message that is kept."
        ),
    ] = False,
    to_last: Annotated[
        bool,
        Parameter(
            name=["--to-last", "--latest"], help="Move to the end: unread messages are skipped."
        ),
    ] = False,
    to_offset: Annotated[
        int | None,
        Parameter(help="Move to this offset in every queue, as far as the queue holds it."),
    ] = None,
    to_time: Annotated[
        str,
        Parameter(
            help="Move to the first message stored from then on: ISO 8601, or ms since 1970."
        ),
    ] = "",
    dry_run: Annotated[
        bool, Parameter(help="Only print what would change, as without --yes.")
    ] = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Move the offsets of a group in a topic, whether its consumers run or not.

    Shows where each queue stands and where it would go on; --yes does it. The broker
    notifies running consumers; where none is connected it stores the offsets.
    """
    if dry_run and yes:
        raise CliError("--dry-run and --yes exclude each other", exit_code=ExitCode.USAGE)
    goal = reset_goal(to_first, to_last, to_time, to_offset)
    await _reset(admin, group, topic, goal, yes, output)


@app.command
@with_admin
async def skip(
    admin: Admin,
    group: GroupName,
    topic: TopicName,
    /,
    *,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Skip the unread messages of a group in a topic: reset --to-last."""
    await _reset(admin, group, topic, ResetGoal(-1), yes, output)


@dataclass(frozen=True, slots=True)
class ResetGoal:
    """Where a group is to go on.

    Args:
        timestamp_ms: First message stored from then on, since the epoch: 0 the first, -1 the end.
        offset: This offset of every queue instead.
    """

    timestamp_ms: int
    offset: int | None = None


def reset_goal(
    to_first: bool, to_last: bool, to_time: str, to_offset: int | None = None
) -> ResetGoal:
    """Return where to go from what was given.

    Raises CliError: none of the four was given, or more than one, or no time; a usage error.
    """
    from dledger.cli.message_command import time_ms

    if to_first + to_last + bool(to_time) + (to_offset is not None) != 1:
        raise CliError(
            "give one of --to-first, --to-last, --to-time T, --to-offset N",
            exit_code=ExitCode.USAGE,
        )
    if to_offset is not None:
        if to_offset < 0:
            raise CliError("--to-offset: from 0 on", exit_code=ExitCode.USAGE)
        return ResetGoal(-1, to_offset)
    if to_last:
        return ResetGoal(-1)
    return ResetGoal(0 if to_first else time_ms(to_time, "--to-time", 0))


async def _reset(
    admin: Admin, group: str, topic: str, goal: ResetGoal, yes: bool, output: Output
) -> None:
    await _require_known(admin, group)
    moves = await _planned(admin, group, topic, goal)
    rows = move_rows(moves)
    if output == "table":
        show(output, f"{group} in {topic}", rows, MOVE_COLUMNS)
    if not yes:
        answer(
            output,
            {"changed": False, "queues": rows},
            f"{group} was not changed; --yes does it",
        )
        return
    done = await admin.reset_offsets(group, topic, goal.timestamp_ms, moves, offset=goal.offset)
    missing = [queue for queue in moves if queue not in done.notified and queue not in done.stored]
    for queue, row in zip(moves, rows, strict=True):
        row["done"] = (
            "notified"
            if queue in done.notified
            else "stored"
            if queue in done.stored
            else "not_stored"
        )
        row["after"] = done.notified.get(queue, row["after"])
    sentences = reset_sentences(len(done.notified), len(done.stored))
    answer(output, {"changed": True, "queues": rows}, *sentences)
    if missing:
        raise CliError(
            f"{len(missing)} queues still have their old offsets: {missing[0]}",
            next_step="do it again",
        )


async def _planned(
    admin: Admin, group: str, topic: str, goal: ResetGoal
) -> Mapping[MessageQueue, OffsetMove]:
    """Return where each queue would go on.

    Raises CliError: there is no such topic; nothing was changed.
    """
    from dledger.client.core.errors import NoRouteError

    try:
        return await admin.plan_offset_reset(group, topic, goal.timestamp_ms, offset=goal.offset)
    except NoRouteError:
        read = {queue.topic for queue in await admin.group_progress(group)}
    raise CliError(
        f"there is no topic {topic}; nothing was changed",
        next_step=other_topics(group, topic, read),
    )


def other_topics(group: str, topic: str, read: Iterable[str]) -> str:
    """Return what to do about a topic that is not there. Pure."""
    names = sorted(name for name in read if not name.startswith("%RETRY%"))
    near = get_close_matches(topic, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if names:
        more = f" and {len(names) - TOPICS_SHOWN} more" if len(names) > TOPICS_SHOWN else ""
        return f"{group} reads {', '.join(names[:TOPICS_SHOWN])}{more}"
    return "see dledger topic ls"


def reset_sentences(notified: int, stored: int) -> list[str]:
    """Return what a reset did, with the queues in which it did so. Pure."""
    sentences = []
    if notified:
        sentences.append(
            f"{notified} queues: running consumers are notified; they store the offsets"
        )
    if stored:
        sentences.append(f"{stored} queues: no consumer is connected; the offsets are stored")
    return sentences or ["nothing was changed: no queue has another offset"]


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


# -------------------------------------------------------------------------------------- pause


@app.command
@with_admin
async def pause(admin: Admin, group: GroupName, /, *, output: Output = "table") -> None:
    """Stop giving messages to a group: consumeEnable=false in every broker group.

    Its members stay connected and keep their offsets; what they hold already they consume.
    """
    await _enable(admin, group, False, output)


@app.command
@with_admin
async def resume(admin: Admin, group: GroupName, /, *, output: Output = "table") -> None:
    """Give messages to a group again that was paused; it goes on at its offsets."""
    await _enable(admin, group, True, output)


async def _enable(admin: Admin, group: str, enable: bool, output: Output) -> None:
    """Let a group consume or not in every broker group, and change nothing else of it.

    Raises:
        CliError: No broker knows the group.
        ClientError: A broker refuses, or none leads; broker groups before it, in order of their
            names, are changed.
    """
    await _require_known(admin, group)
    changed = await admin.set_group_enabled(group, enable)
    state = "gets messages again" if enable else "gets no messages until dledger group resume"
    before = "" if changed else "; it was so before, nothing was changed"
    found = {"group": group, "consume_enable": enable, "changed": changed}
    answer(output, found, f"{group} {state}{before}")


@app.command
@with_admin
async def clone(
    admin: Admin,
    source: GroupName,
    target: GroupName,
    /,
    *,
    topic: Annotated[
        str | None, Parameter(help="Topic; all topics of the group otherwise.")
    ] = None,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Copy the offsets of group SOURCE to group TARGET, which has no running consumers."""
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
        plan = {"changed": False, "queues": rows}
        answer(output, plan, f"{target} was not changed; --yes does it")
        return
    running = await admin.consumer_connection(target)
    if running is not None:
        raise CliError(
            f"{target} has {len(running.connection_set)} consumers running, which would store"
            " their own offsets again; nothing was changed",
            next_step="stop them first",
        )
    await admin.clone_offsets(source, target, topic=topic)
    answer(output, {"changed": True, "queues": rows}, f"{target} begins where {source} stands")


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


@producers.command(name="ls")
@listing(PRODUCER_COLUMNS, (*PRODUCER_COLUMNS, "version", "last_heard"))
async def list_producers(
    admin: Admin,
    group: Annotated[str | None, Parameter(help="Producer group; all otherwise.")] = None,
    /,
) -> Rows:
    """List connected producers."""
    found = await admin.producers()
    if group is not None and group not in found:
        raise CliError(f"no producer of {group} is connected", next_step="see dledger producer ls")
    return [
        {
            "group": name,
            "client_id": producer.client_id,
            "address": producer.remote_ip,
            "language": producer.language,
            "version": producer.version,
            "last_heard": time_text(producer.last_update_timestamp),
        }
        for name, members in found.items()
        for producer in members
        if group in (None, name)
    ]
