"""What waits in brokers, which clients are connected, and the settings of every daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.core.route import MessageQueue
from dledger.console.cluster_look import ClusterLook
from dledger.console.console import Console
from dledger.console.known import asking
from dledger.console.paging import matching, paged
from dledger.own_keys import OWN_KEYS
from dledger.remoting.protocol.bodies import (
    ConsumerConnection,
    ProducerInfo,
    SubscriptionGroupConfig,
)

DELAY_LEVELS: Final = "messageDelayLevel"
DELAY_FIGURE: Final = "scheduleMessageOffset_"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
DECIDED_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One delay level of one broker group.

    Attributes:
        level: From 1 on.
        delay: How long its messages wait; empty where brokers do not show it.
        waiting: Messages that wait now.
    """

    group: str
    level: int
    delay: str
    delivered: int
    waiting: int


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A queue of a topic in which brokers keep what is not due or not decided."""

    queue: MessageQueue
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting of all daemons.

    Attributes:
        values: Daemon → value; None: it has no such setting.
        is_own: Its value is meant to differ.
    """

    key: str
    values: dict[str, str | None]
    is_own: bool

    @property
    def common(self) -> str | None:
        """The value of all daemons; None where they differ."""
        found = set(self.values.values())
        return next(iter(found)) if len(found) == 1 else None

    @property
    def differs(self) -> bool:
        """Daemons that should have the same value have not."""
        return len(set(self.values.values())) > 1 and not self.is_own


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One client of one group."""

    group: str
    kind: str
    client_id: str
    address: str
    language: str
    seen_ms: int | None = None


def level_rows(look: ClusterLook, levels: str) -> list[LevelRow]:
    """Return the delay levels that have messages, or had, of each group's leader. Pure.

    Args:
        levels: The setting that names the delays.
    """
    delays = levels.split()
    found = []
    for group, members in look.groups.items():
        leader = next((a for a, said in members.items() if said and said.get("serving")), None)
        for key, text in look.figures.get(leader or "", {}).items():
            level = key.removeprefix(DELAY_FIGURE)
            delivered, _, end = text.partition(",")
            if key.startswith(DELAY_FIGURE) and level.isdecimal() and end.isdecimal():
                number = int(level)
                delay = delays[number - 1] if 0 < number <= len(delays) else ""
                waiting = max(0, int(end) - int(delivered))
                found.append(LevelRow(group, number, delay, int(delivered), waiting))
    return sorted(
        (row for row in found if row.delivered or row.waiting),
        key=lambda row: (row.group, row.level),
    )


def setting_rows(settings: Mapping[str, Mapping[str, str]]) -> list[SettingRow]:
    """Return every setting of some daemons, by key. Pure.

    Args:
        settings: Daemon → key → value.
    """
    keys = sorted({key for values in settings.values() for key in values})
    return [
        SettingRow(
            key,
            {daemon: values.get(key) for daemon, values in settings.items()},
            key in OWN_KEYS,
        )
        for key in keys
    ]


def client_rows(
    producers: Mapping[str, list[ProducerInfo]], consumers: Mapping[str, ConsumerConnection | None]
) -> list[ClientRow]:
    """Return every client of some groups, in order of groups. Pure."""
    found = [
        ClientRow(
            group,
            "producer",
            client.client_id,
            client.remote_ip,
            client.language,
            client.last_update_timestamp,
        )
        for group, clients in producers.items()
        for client in clients
    ]
    found += [
        ClientRow(group, "consumer", client.client_id, client.client_addr, client.language)
        for group, connection in consumers.items()
        if connection is not None
        for client in connection.connection_set
    ]
    return sorted(found, key=lambda row: (row.group, row.kind, row.client_id))


async def waiting(request: Request) -> Response:
    """Show what is delayed, and what waits for a decision."""
    console: Console = request.app.state.console
    look = await console.newest_look()
    answering = next((a for m in look.groups.values() for a, said in m.items() if said), None)
    nothing = dict[MessageQueue, tuple[int, int]]()
    async with asking() as ask:
        kept = {
            topic: ask(partial(console.admin.offsets, topic), what, nothing)
            for topic, what in (
                (TIMER_TOPIC, "messages with a time of their own"),
                (HALF_TOPIC, "half messages"),
                (DECIDED_TOPIC, "decisions about half messages"),
            )
        }
        settings = ask(
            partial(console.admin.broker_settings, answering or ""),
            "names of the delay levels",
            dict[str, str](),
        )
    without_leader = [
        f"{group} has no leader: its delays are not known"
        for group, members in look.groups.items()
        if not any(said and said.get("serving") for said in members.values())
    ]
    rows = {
        topic: [KeptRow(queue, first, end) for queue, (first, end) in sorted(known.value.items())]
        for topic, known in kept.items()
    }
    return console.page(
        request,
        "waiting.html.j2",
        "Delayed and transactional messages",
        problems=[*without_leader, *ask.problems],
        levels=level_rows(look, settings.value.get(DELAY_LEVELS, "")),
        timers=rows[TIMER_TOPIC],
        halves=rows[HALF_TOPIC],
        decided=sum(row.end_offset - row.first_offset for row in rows[DECIDED_TOPIC]),
    )


async def clients(request: Request) -> Response:
    """Show producers and consumers, page by page of their groups."""
    console: Console = request.app.state.console
    query = request.query_params.get("q", "")
    async with asking() as ask:
        producers = ask(console.admin.producers, "producers", dict[str, list[ProducerInfo]]())
        known = ask(
            console.admin.subscription_groups,
            "consumer groups",
            dict[str, SubscriptionGroupConfig](),
        )
    page = paged(
        matching(sorted({*producers.value, *known.value}), query),
        request.query_params.get("page"),
        {"q": query},
    )
    async with asking() as ask_groups:
        consumers = {
            group: ask_groups(
                partial(console.admin.consumer_connection, group), f"clients of {group}", None
            )
            for group in page.rows
            if group in known.value
        }
    shown = {group: producers.value[group] for group in page.rows if group in producers.value}
    return console.page(
        request,
        "clients.html.j2",
        "Clients",
        problems=[*ask.problems, *ask_groups.problems[:3]],
        rows=client_rows(shown, {group: c.value for group, c in consumers.items()}),
        listing=page,
        query=query,
    )


async def settings(request: Request) -> Response:
    """Show the settings of all daemons, and where they differ."""
    console: Console = request.app.state.console
    query = request.query_params.get("q", "")
    only_differing = request.query_params.get("all") != "1" and not query
    look = await console.newest_look()
    brokers = [address for members in look.groups.values() for address in members]
    async with asking() as ask:
        of_brokers = {
            address: ask(
                partial(console.admin.broker_settings, address),
                f"settings of {address}",
                dict[str, str](),
            )
            for address in brokers
        }
        of_name_servers = {
            address: ask(
                partial(console.admin.name_server_settings, address),
                f"settings of NameServer {address}",
                dict[str, str](),
            )
            for address in look.name_servers
        }
    tables = [
        (title, setting_rows({a: known.value for a, known in found.items() if not known.problem}))
        for title, found in (("Brokers", of_brokers), ("NameServers", of_name_servers))
    ]
    shown = [
        (
            title,
            [
                row
                for row in rows
                if (not only_differing or row.differs) and query.lower() in row.key.lower()
            ],
            len(rows),
        )
        for title, rows in tables
    ]
    return console.page(
        request,
        "settings.html.j2",
        "Settings",
        problems=ask.problems,
        tables=shown,
        query=query,
        only_differing=only_differing,
    )
