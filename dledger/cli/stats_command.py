"""``dledger stats``: what comes into topics, what groups get, and what waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dledger.cli.commands import repeated, with_admin
from dledger.cli.topic_command import plain_topics
from dledger.output import ExitCode, RowsOutput, Wide, show

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.protocol.bodies import BrokerStatsData

COLUMNS = ("topic", "group", "in_per_s", "out_per_s", "lag")
WIDE_COLUMNS = ("topic", "group", "in_per_s", "out_per_s", "in_24h", "out_24h", "lag")
TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
GROUP_GET_NUMS = "GROUP_GET_NUMS"
ASKED_AT_ONCE = 8
"""Statistics asked for at a time, of all brokers each."""


@with_admin
async def stats(
    admin: Admin,
    topic: Annotated[str | None, Parameter(help="Name of the topic; all otherwise.")] = None,
    /,
    *,
    watch: Annotated[bool, Parameter(help="Repeat until Ctrl-C.")] = False,
    every_s: Annotated[float, Parameter(help="Seconds between two readings.")] = 2.0,
    looks: Annotated[int | None, Parameter(help="Stop after this many readings.")] = None,
    wide: Wide = False,
    output: RowsOutput = "table",
) -> int:
    """Show rates of the last minute and lag, per topic and group; --wide: counts of 24 hours.

    Brokers count since they started; what a group got is summed over all brokers.
    """

    async def look() -> int:
        rows = await stats_of(admin, None if topic is None else [topic])
        show(output, "", rows, WIDE_COLUMNS if wide else COLUMNS)
        return ExitCode.OK

    most = looks if looks is not None else (None if watch else 1)
    return await repeated(look, every_s, most, option="--every-s")


async def topics_by_lag(admin: Admin) -> list[str]:
    """Return all topics that are not the brokers' own, those with the most waiting first."""
    waiting: dict[str, int] = dict.fromkeys(await plain_topics(admin), 0)
    for by_topic in (await admin.lags()).values():
        for name, lag in by_topic.items():
            waiting[name] = waiting.get(name, 0) + lag
    return sorted(waiting, key=lambda name: (-waiting[name], name))


async def stats_of(admin: Admin, wanted: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return one row per topic and group that has an offset of it, from all brokers."""
    from dledger.client.admin.daemons import ask_each

    lags = await admin.lags()
    groups: dict[str, dict[str, int]] = {}
    for group, by_topic in lags.items():
        for name, lag in by_topic.items():
            groups.setdefault(name, {})[group] = lag
    topics = wanted if wanted is not None else sorted({*groups, *await plain_topics(admin)})
    keys = [(TOPIC_PUT_NUMS, name) for name in topics]
    keys += [
        (GROUP_GET_NUMS, f"{name}@{group}") for name in topics for group in groups.get(name, ())
    ]
    said = await ask_each(lambda key: admin.broker_stats(*key), keys, ASKED_AT_ONCE)
    info = await admin.cluster_info()
    leaders = {
        group.broker_addrs[0]
        for group in info.broker_addr_table.values()
        if 0 in group.broker_addrs
    }
    rows = []
    for name in topics:
        # All members of a group count what comes in; the leaders together have it once.
        came = {a: data for a, data in said[TOPIC_PUT_NUMS, name].items() if a in leaders}
        for group, lag in sorted(groups.get(name, {}).items()):
            went = said[GROUP_GET_NUMS, f"{name}@{group}"]
            rows.append(stats_row(name, group, came, went, lag))
        if not groups.get(name):
            rows.append(stats_row(name, None, came, {}, None))
    return rows


def stats_row(
    topic: str,
    group: str | None,
    came: Mapping[str, BrokerStatsData],
    went: Mapping[str, BrokerStatsData],
    lag: int | None,
) -> dict[str, Any]:
    """Return what is shown of a topic and one of its groups. Pure."""
    return {
        "topic": topic,
        "group": group,
        "in_per_s": round(sum(data.stats_minute.tps for data in came.values()), 2),
        "out_per_s": round(sum(data.stats_minute.tps for data in went.values()), 2),
        "in_24h": sum(data.stats_day.sum for data in came.values()),
        "out_24h": sum(data.stats_day.sum for data in went.values()),
        "lag": lag,
    }
