"""``dledger topic``: list, create, show and delete topics, and what may be changed of one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.cli.commands import Rows, change_each, listing, with_admin
from dledger.output import (
    CliError,
    ExitCode,
    Output,
    TopicName,
    Yes,
    answer,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin

_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

TYPE: Final = "message.type"
"""Attribute of a topic: which messages a proxy takes for it."""

PERMISSIONS: Final = {"r": 4, "w": 2, "rw": 6, "none": 0}


def permission_text(perm: int) -> str:
    """Return the permission bits as people read them."""
    return ("R" if perm & 4 else "-") + ("W" if perm & 2 else "-") + ("X" if perm & 1 else "-")


def duration_ms(text: str) -> int:
    """Return milliseconds of a time such as ``7d``. Raises CliError: it is none; a usage error."""
    match = re.fullmatch(r"([0-9]{1,12})(ms|s|m|h|d)", text)
    if match is None or not int(match[1]):
        raise CliError(
            f"{text!r} is no time such as 7d, 6h, 30m, 90s or 1500ms", exit_code=ExitCode.USAGE
        )
    return int(match[1]) * _UNIT_MS[match[2]]


def topic_changes(
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    permission: str | None,
    attributes: Sequence[str],
) -> dict[str, str]:
    """Return the fields of a request that differ from what a topic has. Pure.

    Raises CliError: nothing was given, or something that a topic cannot have; a usage error.
    """
    if permission is not None and permission not in PERMISSIONS:
        raise CliError("--permission is r, w, rw or none", exit_code=ExitCode.USAGE)
    counts = {
        "readQueueNums": queues if read_queues is None else read_queues,
        "writeQueueNums": queues if write_queues is None else write_queues,
    }
    changes = {name: str(count) for name, count in counts.items() if count is not None}
    if any(int(count) < 1 for count in changes.values()):
        raise CliError("a topic has at least 1 queue", exit_code=ExitCode.USAGE)
    if permission is not None:
        changes["perm"] = str(PERMISSIONS[permission])
    parts = []
    for pair in attributes:
        name, equals, value = pair.partition("=")
        if not (name and equals) or "," in pair:
            raise CliError(f"--attribute {pair}: expected name=value", exit_code=ExitCode.USAGE)
        if value:
            _check_attribute(name)
        parts.append(f"+{name}={value}" if value else f"-{name}")
    if parts:
        changes["attributes"] = ",".join(parts)
    if not changes:
        raise CliError(
            "nothing to change",
            next_step="give --queues, --permission or --attribute",
            exit_code=ExitCode.USAGE,
        )
    return changes


def _check_attribute(name: str) -> None:
    """Refuse a name that brokers would store and never read; one that is stored may be removed.

    Raises CliError: a usage error.
    """
    from dledger.processors.topics import TYPE_ATTRIBUTE
    from dledger.services.retention import RETENTION_ATTRIBUTE

    known = (TYPE_ATTRIBUTE, RETENTION_ATTRIBUTE)
    if name in known:
        return
    near = get_close_matches(name, known, n=1)
    raise CliError(
        f"--attribute {name}: topics have the attributes {', '.join(known)}; nothing was changed",
        next_step=f"did you mean {near[0]}?" if near else "",
        exit_code=ExitCode.USAGE,
    )


app = App(name="topic", help="List, create, show and delete topics.", backend="trio")

ROUTE_COLUMNS = ("broker", "read", "write", "perm", "members")
"""What fits into 80 columns: queues for reading and writing; JSON names each by itself."""


@app.command
@listing(("topic",))
async def ls(
    admin: Admin,
    *,
    system: Annotated[bool, Parameter(help="Show the broker's own topics too.")] = False,
) -> Rows:
    """List topics."""
    names = await admin.topic_list() if system else await plain_topics(admin)
    return [{"topic": name} for name in names]


async def plain_topics(admin: Admin) -> list[str]:
    """Return the topics that are not the brokers' own."""
    from dledger.remoting.protocol.topic_names import is_system

    info = await admin.cluster_info()
    own = {*info.broker_addr_table, *info.cluster_addr_table}
    return [name for name in await admin.topic_list() if not is_system(name, own)]


@app.command
@with_admin
async def create(
    admin: Admin,
    topic: TopicName,
    /,
    *,
    queues: Annotated[int, Parameter(help="Read and write queues.")] = 4,
    permission: Annotated[str, Parameter(help="r, w or rw.")] = "rw",
    type_: Annotated[
        str | None,
        Parameter(name="--type", help="NORMAL, FIFO, DELAY, TRANSACTION or MIXED: message.type."),
    ] = None,
    cluster: Annotated[str | None, Parameter(help="Cluster; all brokers otherwise.")] = None,
    broker: Annotated[
        tuple[str, ...] | None, Parameter(help="Broker group, may be repeated; all otherwise.")
    ] = None,
    output: Output = "table",
) -> None:
    """Create a topic in every broker group; where it exists it has to be the same.

    A topic that exists is changed by `dledger topic update`.
    """
    if permission not in PERMISSIONS or queues < 1:
        raise CliError("--permission is r, w or rw; --queues at least 1", exit_code=ExitCode.USAGE)
    wanted = (queues, queues, PERMISSIONS[permission])
    groups = await groups_of(admin, cluster, broker)
    for name in groups:
        config = await admin.topic_config(topic, name)
        if config is not None and (
            (config.read_queue_nums, config.write_queue_nums, config.perm) != wanted
            or (type_ or config.attributes.get(TYPE)) != config.attributes.get(TYPE)
        ):
            raise CliError(
                f"{name} has a topic {topic} already, with {config.write_queue_nums} queues to"
                f" write, {config.read_queue_nums} to read, {permission_text(config.perm)} and"
                f" {TYPE} {config.attributes.get(TYPE, 'none')}; nothing was changed",
                next_step=f"dledger topic update {topic} changes it",
            )
    names = await admin.create_topic(
        topic,
        queue_nums=queues,
        perm=PERMISSIONS[permission],
        attributes=None if type_ is None else {TYPE: type_},
        broker_names=groups,
    )
    found = {"topic": topic, "queues": queues, "brokers": names}
    answer(output, found, f"{topic}: {queues} queues in {', '.join(names)}")


async def groups_of(
    admin: Admin, cluster: str | None, brokers: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the broker groups of a cluster, or of all of them.

    Raises CliError: there is none, or one of *brokers* is not among them.
    """
    info = await admin.cluster_info()
    names = set(
        info.broker_addr_table if cluster is None else info.cluster_addr_table.get(cluster, ())
    )
    if not names:
        raise CliError(
            f"no broker of cluster {cluster} is registered" if cluster else "no broker registered",
            next_step="see dledger cluster ls",
        )
    if unknown := set(brokers or ()) - names:
        raise CliError(
            f"no broker {', '.join(sorted(unknown))}", next_step="see dledger cluster ls"
        )
    return tuple(sorted(names if brokers is None else brokers))


@app.command
@with_admin
async def route(admin: Admin, topic: TopicName, /, *, output: Output = "table") -> None:
    """Show where the queues of a topic are."""
    data = await admin.topic_route_data(topic)
    brokers = {broker.broker_name: broker.broker_addrs for broker in data.broker_datas}
    rows: list[dict[str, Any]] = [
        {
            "broker": queue.broker_name,
            "read_queues": queue.read_queue_nums,
            "write_queues": queue.write_queue_nums,
            "permission": permission_text(queue.perm),
            "leader": brokers[queue.broker_name].get(0),
            "followers": [
                address for number, address in sorted(brokers[queue.broker_name].items()) if number
            ],
        }
        for queue in sorted(data.queue_datas, key=lambda queue: queue.broker_name)
    ]
    shown = rows if output == "json" else [route_line(row) for row in rows]
    show(output, topic, shown, ROUTE_COLUMNS)


def route_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a broker's queues: its members below each other. Pure."""
    members = [f"{row['leader'] or 'no'} leader", *row["followers"]]
    return {
        "broker": row["broker"],
        "read": row["read_queues"],
        "write": row["write_queues"],
        "perm": row["permission"],
        "members": "\n".join(members),
    }


@app.command
@with_admin
async def info(admin: Admin, topic: TopicName, /, *, output: Output = "table") -> None:
    """Show offsets and number of messages of each queue."""
    offsets = await admin.offsets(topic)
    rows = [
        {
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "min_offset": first,
            "max_offset": end,
            "messages": end - first,
        }
        for queue, (first, end) in offsets.items()
    ]
    if output == "json":
        messages = sum(end - first for first, end in offsets.values())
        print_json({"topic": topic, "messages": messages, "queues": rows})
    else:
        show(output, topic, rows, ("broker", "queue", "min_offset", "max_offset", "messages"))


@app.command
@with_admin
async def perm(
    admin: Admin,
    topic: TopicName,
    permission: Annotated[str, Parameter(help="r, w, rw or none.")],
    /,
    *,
    broker: Annotated[
        tuple[str, ...] | None, Parameter(help="Broker group, may be repeated; all otherwise.")
    ] = None,
    output: Output = "table",
) -> None:
    """Change the permissions of a topic."""
    if permission not in PERMISSIONS:
        raise CliError("the permission is r, w, rw or none", exit_code=ExitCode.USAGE)
    names = await admin.set_topic_perm(topic, PERMISSIONS[permission], broker_names=broker)
    found = {"topic": topic, "permission": permission, "brokers": names}
    answer(output, found, f"{topic}: {permission} in {', '.join(names)}")


@app.command
@with_admin
async def update(
    admin: Admin,
    topic: TopicName,
    /,
    *,
    queues: Annotated[int | None, Parameter(help="Read and write queues.")] = None,
    read_queues: Annotated[int | None, Parameter(help="Queues for reading.")] = None,
    write_queues: Annotated[int | None, Parameter(help="Queues for writing.")] = None,
    permission: Annotated[str | None, Parameter(help="r, w, rw or none.")] = None,
    attribute: Annotated[
        tuple[str, ...] | None,
        Parameter(help="name=value, or name= to remove it; may be repeated."),
    ] = None,
    broker: Annotated[
        tuple[str, ...] | None, Parameter(help="Broker group, may be repeated; all otherwise.")
    ] = None,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Change what is given of a topic, and nothing else of it.

    Where messages would be removed, or stand in queues that nothing reads then, they are counted
    first, and --yes is needed.
    """
    changes = topic_changes(queues, read_queues, write_queues, permission, attribute or ())
    await _change_groups(admin, topic, changes, broker, yes, output)


@app.command
@with_admin
async def retention(
    admin: Admin,
    topic: TopicName,
    keeps: Annotated[
        str, Parameter(help="Time, as 7d, 6h, 30m, 90s or 1500ms; none: as long as the log.")
    ],
    /,
    *,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Change how long a topic keeps its messages.

    A shorter time removes messages: they are counted first, and --yes is needed.
    """

    attribute = "-retention.ms" if keeps == "none" else f"+retention.ms={duration_ms(keeps)}"
    await _change_groups(admin, topic, {"attributes": attribute}, None, yes, output, what=keeps)


async def _change_groups(
    admin: Admin,
    topic: str,
    changes: Mapping[str, str],
    brokers: Sequence[str] | None,
    yes: bool,
    output: Output,
    *,
    what: str = "changed",
) -> None:
    """Change a topic where nothing is lost by it, elsewhere with *yes*; print what was done.

    Raises CliError: a group refuses, has no leader, or does not have the topic.
    """
    has_it = sorted((await admin.topic_route(topic)).addresses)
    if missing := set(brokers or ()) - set(has_it):
        raise CliError(
            f"{topic} is not in {', '.join(sorted(missing))}; nothing was changed",
            next_step=f"see dledger topic route {topic}",
        )
    groups = [name for name in has_it if brokers is None or name in brokers]
    shown = await change_each(
        groups, partial(_change, admin, topic, changes, what), yes=yes, output=output
    )
    if shown.left:
        note(f"{topic} in {', '.join(shown.left)}: not changed; --yes does it")
    if output == "json" and not shown.gives_up:
        print_json([{"broker": group, "topic": topic} for group in groups])


async def _change(
    admin: Admin, topic: str, changes: Mapping[str, str], what: str, group: str, is_confirmed: bool
) -> str:
    await admin.change_topic(topic, group, changes, gives_up_messages=is_confirmed)
    return f"{topic} in {group}: {what}"


@app.command
@with_admin
async def delete(
    admin: Admin,
    topic: TopicName,
    /,
    *,
    cluster: Annotated[str | None, Parameter(help="Cluster; all brokers otherwise.")] = None,
    yes: Annotated[
        bool, Parameter(name="--yes", negative="", help="Do not ask, even if messages are removed.")
    ] = False,
) -> int:
    """Delete a topic in every broker group, with its messages.

    Asks first on a terminal when it holds messages; elsewhere --yes is needed.
    """
    await admin.topic_route(topic)
    groups = await groups_of(admin, cluster)
    if not yes:
        offsets = await admin.offsets(topic)
        held = sum(end - first for q, (first, end) in offsets.items() if q.broker_name in groups)
        if not await _may_delete(topic, held):
            note(f"{topic} was not deleted")
            return ExitCode.FAILED
    await admin.delete_topic(topic, broker_names=groups)
    note(f"{topic} is deleted")
    return ExitCode.OK


async def _may_delete(topic: str, messages: int) -> bool:
    """Ask on a terminal whether this many messages may go; an empty topic needs no question.

    Raises CliError: standard input is no terminal.
    """
    import trio

    if not messages:
        return True
    if not sys.stdin.isatty():
        raise CliError(
            f"{topic} holds {messages:,} messages, which would be removed; nothing was deleted",
            next_step="--yes deletes it with them",
        )
    sys.stderr.write(f"{topic} holds {messages:,} messages, which go with it. Delete it? [y/N] ")
    sys.stderr.flush()
    answer = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    return answer.strip().lower() in ("y", "yes")
