"""``dledger topic``: list, create, show and delete topics."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dledger.cli.topic_changes import PERMISSIONS, duration_ms, permission_text, topic_changes
from dledger.cli.watch import Watch, repeated
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    TopicName,
    Yes,
    addresses,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.remoting.protocol.bodies import BrokerData
    from dledger.remoting.protocol.own_fields import GivenUp

app = App(name="topic", help="List, create, show and delete topics.", backend="trio")

SYSTEM_PREFIXES = ("RMQ_SYS_", "rmq_sys_", "%RETRY%", "%DLQ%")
SYSTEM_TOPICS = frozenset(
    {
        "TBW102",
        "SELF_TEST_TOPIC",
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        "SCHEDULE_TOPIC_XXXX",
        "rmq_sys_wheel_timer",
        "TRANS_CHECK_MAX_TIME_TOPIC",
    }
)
ROUTE_WAIT_S = 5.0
"""A broker registers a new topic at once; a NameServer that is slow gets this long."""

ROUTE_COLUMNS = ("broker", "read", "write", "perm", "members")
"""What fits into 80 columns: queues for reading and writing; JSON names each by itself."""


@app.command
async def ls(
    *,
    watch: Watch = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    system: Annotated[bool, Parameter(help="Show the broker's own topics too.")] = False,
    output: Output = "table",
) -> int:
    """List topics."""

    async def look() -> int:
        from dledger.cli.ask_cluster import any_cluster_info, ask_namesrvs, refused
        from dledger.remoting.protocol.bodies import TopicList
        from dledger.remoting.protocol.codes import RequestCode, ResponseCode

        answer = await ask_namesrvs(
            addresses(namesrv), RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refused("list of topics", answer)
        names = sorted(TopicList.decode(answer.body).topic_list)
        if not system:
            _, info_ = await any_cluster_info(addresses(namesrv))
            own = {*info_.broker_addr_table, *info_.cluster_addr_table}
            own |= {f"{cluster}_REPLY_TOPIC" for cluster in info_.cluster_addr_table}
            names = [
                name
                for name in names
                if name not in SYSTEM_TOPICS | own and not name.startswith(SYSTEM_PREFIXES)
            ]
        show(output, "", [{"topic": name} for name in names], ("topic",))
        return ExitCode.OK

    return await repeated(look, watch)


@app.command
async def create(
    topic: TopicName,
    /,
    *,
    queues: Annotated[int, Parameter(help="Read and write queues.")] = 4,
    permission: Annotated[str, Parameter(help="r, w or rw.")] = "rw",
    cluster: Annotated[str | None, Parameter(help="Cluster; all brokers otherwise.")] = None,
    broker: Annotated[
        tuple[str, ...] | None, Parameter(help="Broker group, may be repeated; all otherwise.")
    ] = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Create a topic in every broker group, or change it."""
    if permission not in PERMISSIONS or queues < 1:
        raise CliError("--permission is r, w or rw; --queues at least 1", exit_code=ExitCode.USAGE)
    names = await create_topic(
        addresses(namesrv),
        topic,
        queues=queues,
        perm=PERMISSIONS[permission],
        cluster=cluster,
        brokers=broker,
    )
    if output == "json":
        print_json({"topic": topic, "queues": queues, "brokers": names})
    else:
        note(f"{topic}: {queues} queues in {', '.join(names)}")
    return ExitCode.OK


async def create_topic(
    namesrvs: list[str],
    topic: str,
    *,
    queues: int,
    perm: int = 6,
    cluster: str | None = None,
    brokers: Sequence[str] | None = None,
) -> list[str]:
    """Create a topic in every broker group and wait for its route; return the groups' names.

    Args:
        brokers: In these groups only.
    Raises:
        CliError: A broker refuses, none leads, or a group is not there.
    """
    from dledger.cli.ask_cluster import ask_leader, groups_of, refused
    from dledger.remoting.protocol.codes import RequestCode, ResponseCode

    ext = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queues),
        "writeQueueNums": str(queues),
        "perm": str(perm),
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    groups = await groups_of(namesrvs, cluster)
    if brokers is not None:
        unknown = set(brokers) - {group.broker_name for group in groups}
        if unknown:
            raise CliError(
                f"no broker {', '.join(sorted(unknown))}", next_step="see dledger cluster ls"
            )
        groups = [group for group in groups if group.broker_name in brokers]
    for group in groups:
        answer = await ask_leader(group, RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
        if answer.code != ResponseCode.SUCCESS:
            raise refused(f"creating {topic} in {group.broker_name}", answer)
    names = [group.broker_name for group in groups]
    await _wait_route(namesrvs, topic, set(names))
    return names


async def _wait_route(namesrvs: list[str], topic: str, brokers: set[str]) -> None:
    import trio

    from dledger.cli.ask_cluster import topic_route

    with trio.move_on_after(ROUTE_WAIT_S):
        while True:
            try:
                route_ = await topic_route(namesrvs, topic)
                if brokers <= {data.broker_name for data in route_.queue_datas}:
                    return
            except CliError as error:
                if error.exit_code == ExitCode.UNREACHABLE:
                    raise
            await trio.sleep(0.05)
    note(f"{topic} is stored, but not in the route of {namesrvs[0]} yet")


@app.command
async def route(
    topic: TopicName, /, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Show where the queues of a topic are."""
    from dledger.cli.ask_cluster import topic_route

    data = await topic_route(addresses(namesrv), topic)
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
    if output == "json":
        print_json(rows)
        return ExitCode.OK
    show(output, topic, [route_line(row) for row in rows], ROUTE_COLUMNS)
    return ExitCode.OK


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


async def queue_bounds(namesrvs: list[str], topic: str) -> list[dict[str, Any]]:
    """Return min and max offset of every queue of a topic, asked of the leaders."""
    from dledger.cli.ask_cluster import all_of, ask_leader, refused, topic_route
    from dledger.remoting.protocol.codes import RequestCode, ResponseCode

    data = await topic_route(namesrvs, topic)
    brokers = {broker.broker_name: broker for broker in data.broker_datas}
    jobs = {}
    for queue in data.queue_datas:
        for queue_id in range(max(queue.read_queue_nums, queue.write_queue_nums)):
            for name, code in (
                ("min_offset", RequestCode.GET_MIN_OFFSET),
                ("max_offset", RequestCode.GET_MAX_OFFSET),
            ):
                jobs[(queue.broker_name, queue_id, name)] = partial(
                    ask_leader,
                    brokers[queue.broker_name],
                    code,
                    {"topic": topic, "queueId": str(queue_id)},
                )
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for (broker, queue_id, name), answer in sorted((await all_of(jobs)).items()):
        if answer.code != ResponseCode.SUCCESS:
            raise refused(f"{name} of {topic} queue {queue_id}", answer)
        row = rows.setdefault((broker, queue_id), {"broker": broker, "queue": queue_id})
        row[name] = int(answer.ext["offset"])
    for row in rows.values():
        row["messages"] = row["max_offset"] - row["min_offset"]
    return [rows[key] for key in sorted(rows)]


@app.command
async def info(
    topic: TopicName, /, *, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table"
) -> int:
    """Show offsets and number of messages of each queue."""
    rows = await queue_bounds(addresses(namesrv), topic)
    if output == "json":
        print_json(
            {"topic": topic, "messages": sum(row["messages"] for row in rows), "queues": rows}
        )
    else:
        show(output, topic, rows, ("broker", "queue", "min_offset", "max_offset", "messages"))
    return ExitCode.OK


@app.command
async def perm(
    topic: TopicName,
    permission: Annotated[str, Parameter(help="r, w, rw or none.")],
    /,
    *,
    broker: Annotated[
        tuple[str, ...] | None, Parameter(help="Broker group, may be repeated; all otherwise.")
    ] = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Change the permissions of a topic."""
    from dledger.cli.ask_cluster import open_client
    from dledger.client.admin.admin import Admin
    from dledger.client.core.errors import NoRouteError

    if permission not in PERMISSIONS:
        raise CliError("the permission is r, w, rw or none", exit_code=ExitCode.USAGE)
    async with open_client(addresses(namesrv)) as client:
        try:
            names = await Admin(client).set_topic_perm(
                topic, PERMISSIONS[permission], broker_names=broker
            )
        except NoRouteError as error:
            raise CliError(
                f"no route to topic {topic}", next_step="see dledger topic ls"
            ) from error
    if output == "json":
        print_json({"topic": topic, "permission": permission, "brokers": names})
    else:
        note(f"{topic}: {permission} in {', '.join(names)}")
    return ExitCode.OK


@app.command
async def update(
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
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Change what is given of a topic, and nothing else of it.

    Where messages would be removed, they are counted first, and --yes is needed.
    """
    changes = topic_changes(queues, read_queues, write_queues, permission, attribute or ())
    await _change_groups(addresses(namesrv), topic, changes, broker, yes, output)
    return ExitCode.OK


@app.command
async def retention(
    topic: TopicName,
    keeps: Annotated[
        str, Parameter(help="Time, as 7d, 6h, 30m, 90s or 1500ms; none: as long as the log.")
    ],
    /,
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Change how long a topic keeps its messages.

    A shorter time removes messages: they are counted first, and --yes is needed.
    """

    attribute = "-retention.ms" if keeps == "none" else f"+retention.ms={duration_ms(keeps)}"
    await _change_groups(
        addresses(namesrv), topic, {"attributes": attribute}, None, yes, output, what=keeps
    )
    return ExitCode.OK


async def _change_groups(
    namesrvs: list[str],
    topic: str,
    changes: Mapping[str, str],
    brokers: Sequence[str] | None,
    yes: bool,
    output: Output,
    *,
    what: str = "changed",
) -> None:
    """Change a topic where nothing is lost by it, elsewhere with *yes*; print what was done.

    Raises:
        CliError: A group refuses, has no leader, or does not have the topic.
    """
    from dledger.cli.ask_cluster import show_given_up, topic_route

    data = await topic_route(namesrvs, topic)
    groups = [
        group for group in data.broker_datas if brokers is None or group.broker_name in brokers
    ]
    missing = set(brokers or ()) - {group.broker_name for group in groups}
    if missing:
        raise CliError(
            f"{topic} is not in {', '.join(sorted(missing))}; nothing was changed",
            next_step=f"see dledger topic route {topic}",
        )
    waiting: dict[str, GivenUp] = {}
    for group in groups:
        lost = await _change(group, topic, changes, is_confirmed=False)
        if lost is None:
            note(f"{topic} in {group.broker_name}: {what}")
        else:
            waiting[group.broker_name] = lost
    show_given_up(waiting, output)
    if output == "json" and not waiting:
        print_json([{"broker": group.broker_name, "topic": topic} for group in groups])
    if waiting and not yes:
        note(f"{topic} in {', '.join(waiting)}: not changed; --yes does it")
        return
    for group in groups:
        if group.broker_name in waiting:
            await _change(group, topic, changes, is_confirmed=True)
            note(f"{topic} in {group.broker_name}: {what}")


async def _change(
    group: BrokerData, topic: str, changes: Mapping[str, str], *, is_confirmed: bool
) -> GivenUp | None:
    """Change fields of a topic; return what has to be confirmed first, having done nothing.

    Raises:
        CliError: The group refuses, or has no leader.
    """
    from dledger.cli.ask_cluster import ask_leader, confirmed, given_up_in, refused
    from dledger.remoting.protocol.bodies import TopicConfig
    from dledger.remoting.protocol.codes import RequestCode, ResponseCode

    answer = await ask_leader(group, RequestCode.GET_TOPIC_CONFIG, {"topic": topic})
    if answer.code != ResponseCode.SUCCESS:
        raise refused(f"{topic} in {group.broker_name}", answer)
    config = TopicConfig.decode(answer.body)
    ext = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(config.read_queue_nums),
        "writeQueueNums": str(config.write_queue_nums),
        "perm": str(config.perm),
        "topicFilterType": config.topic_filter_type,
        "topicSysFlag": str(config.topic_sys_flag),
        "order": "true" if config.order else "false",
        **changes,
        **(confirmed() if is_confirmed else {}),
    }
    answer = await ask_leader(group, RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
    if answer.code == ResponseCode.SUCCESS:
        return None
    lost = given_up_in(answer)
    if lost is None or is_confirmed:
        raise refused(f"changing {topic} in {group.broker_name}", answer)
    return lost


@app.command
async def delete(
    topic: TopicName,
    /,
    *,
    cluster: Annotated[str | None, Parameter(help="Cluster; all brokers otherwise.")] = None,
    yes: Annotated[
        bool, Parameter(name="--yes", negative="", help="Do not ask, even if messages are removed.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
) -> int:
    """Delete a topic in every broker group, with its messages.

    Asks first on a terminal when it holds messages; elsewhere --yes is needed.
    """
    from dledger.cli.ask_cluster import (
        NoAnswerError,
        ask_leader,
        ask_namesrvs,
        groups_of,
        refused,
        topic_route,
    )
    from dledger.remoting.protocol.codes import RequestCode, ResponseCode

    namesrvs = addresses(namesrv)
    await topic_route(namesrvs, topic, next_step="see dledger topic ls")
    groups = await groups_of(namesrvs, cluster)
    if not yes and not await _may_delete(topic, await _messages_in(groups, topic)):
        note(f"{topic} was not deleted")
        return ExitCode.FAILED
    for group in groups:
        answer = await ask_leader(group, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})
        if answer.code != ResponseCode.SUCCESS:
            raise refused(f"deleting {topic} in {group.broker_name}", answer)
    silent: list[NoAnswerError] = []
    for address in namesrvs:
        try:
            answer = await ask_namesrvs(
                [address], RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": topic}
            )
        except NoAnswerError as error:
            silent.append(error)
            continue
        if answer.code not in (ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST):
            raise refused(f"deleting {topic} at {address}", answer)
    if silent:
        why = "; ".join(map(str, silent))
        raise CliError(
            f"{topic} is deleted in every broker group, and may still be listed: {why}",
            exit_code=ExitCode.UNREACHABLE,
        )
    note(f"{topic} is deleted")
    return ExitCode.OK


async def _messages_in(groups: Sequence[BrokerData], topic: str) -> int:
    """Return how many messages of a topic are kept in these broker groups."""
    from dledger.cli.ask_cluster import ask_leader, refused
    from dledger.remoting.protocol.bodies import TopicStatsTable
    from dledger.remoting.protocol.codes import RequestCode, ResponseCode

    messages = 0
    for group in groups:
        answer = await ask_leader(group, RequestCode.GET_TOPIC_STATS_INFO, {"topic": topic})
        if answer.code == ResponseCode.SUCCESS:
            queues = TopicStatsTable.decode(answer.body).offset_table.values()
            messages += sum(queue.max_offset - queue.min_offset for queue in queues)
        elif answer.code != ResponseCode.TOPIC_NOT_EXIST:
            raise refused(f"counting the messages of {topic} in {group.broker_name}", answer)
    return messages


async def _may_delete(topic: str, messages: int) -> bool:
    """Ask on a terminal whether this many messages may go; an empty topic needs no question.

    Raises:
        CliError: Standard input is no terminal.
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
