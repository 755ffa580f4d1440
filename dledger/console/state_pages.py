"""The cluster, what waits in brokers, which clients are connected, every daemon's settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.client.core.route import MessageQueue
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.console.console import Console, Form, RefusedError, change
from dledger.console.known import asking
from dledger.console.look import ClusterLook, group_views
from dledger.console.texts import paged
from dledger.remoting.protocol.bodies import ProducerInfo, SubscriptionGroupConfig
from dledger.remoting.protocol.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from dledger.settings.text import OWN_KEYS


async def cluster(request: Request) -> Response:
    """Show the cluster."""
    console: Console = request.app.state.console
    values = shown(await console.newest_look())
    return console.page(request, "cluster.html.j2", "Cluster", refresh_s=5, **values)


async def live(request: Request) -> Response:
    """Return the part of the page that moves."""
    console: Console = request.app.state.console
    values = shown(await console.newest_look())
    changes = console.settings.allow_changes
    return console.fragment("cluster_live.html.j2", allow_changes=changes, **values)


def shown(look: ClusterLook) -> dict[str, Any]:
    """Return what the template shows of a look. Pure."""
    views, problems = group_views(look), []
    silent = [address for address, known in look.name_servers.items() if known is None]
    if look.name_servers and len(silent) == len(look.name_servers):
        problems.append(
            "no NameServer answers: what is shown of members comes from themselves, and a group"
            " that was never seen before is missing"
        )
    elif silent:
        problems.append(f"NameServer {', '.join(silent)} does not answer")
    for view in views:
        roles = [row.role for row in view.members]
        if "refused" in roles:
            problems.append(
                f"{roles.count('refused')} of {len(roles)} members of {view.name} refuse the"
                " account of this console: their terms, indexes and disks are not known"
            )
        elif view.leader is None:
            problems.append(
                f"{view.name} has no leader now: nothing can be stored there, lag is not known"
            )
        if "no answer" in roles:
            problems.append(
                f"{roles.count('no answer')} of {len(roles)} members of {view.name} do not answer:"
                " their terms, indexes and disks are not known"
            )
    if not views:
        problems.append("no broker group is known")
    return {"groups": views, "look": look, "problems": problems}


@change(
    lambda form: f"move leadership of {form.get('group')} to {form.get('member')}",
    lambda form: "/cluster",
)
async def transfer(admin: Admin, form: Form) -> str:
    """Move the leadership of a group."""
    if not form.get("group"):
        raise RefusedError("no group is named")
    await admin.change_members(form["group"], "transfer", form.get("member", ""))
    return "done"


DELAY_LEVELS: Final = "messageDelayLevel"
DELAY_FIGURE: Final = "scheduleMessageOffset_"


class SettingRow(NamedTuple):
    """One setting of all daemons; *values*: daemon → value; None: it has no such setting."""

    key: str
    values: dict[str, str | None]

    @property
    def common(self) -> str | None:
        """The value of all daemons; None where they differ."""
        first, *others = set(self.values.values())
        return None if others else first

    @property
    def differs(self) -> bool:
        """Daemons that should have the same value have not."""
        return len(set(self.values.values())) > 1 and self.key not in OWN_KEYS


def level_rows(look: ClusterLook, levels: str) -> list[tuple[str, int, str, int, int]]:
    """Return the delay levels that have messages, or had, of each group's leader. Pure.

    Args:
        levels: The setting that names the delays.
    Returns:
        Broker group, level, how long its messages wait, how many wait now, how many were delivered.
    """
    delays = dict(enumerate(levels.split(), 1))
    rows = []
    for group, leader in look.leaders().items():
        for key, text in look.figures.get(leader or "", {}).items():
            level = key.removeprefix(DELAY_FIGURE)
            done, _, end = text.partition(",")
            if key.startswith(DELAY_FIGURE) and level.isdecimal() and end.isdecimal():
                waiting = max(0, int(end) - int(done))
                rows.append((group, int(level), delays.get(int(level), ""), waiting, int(done)))
    return sorted(row for row in rows if row[3] or row[4])


def setting_rows(settings: Mapping[str, Mapping[str, str]]) -> list[SettingRow]:
    """Return every setting of some daemons, by key. Pure; *settings*: daemon → key → value."""
    return [
        SettingRow(key, {name: values.get(key) for name, values in settings.items()})
        for key in sorted({key for values in settings.values() for key in values})
    ]


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
                (OP_HALF_TOPIC, "decisions about half messages"),
            )
        }
        settings = ask(
            partial(console.admin.broker_settings, answering or ""),
            "names of the delay levels",
            dict[str, str](),
        )
    without_leader = [
        f"{group} has no leader: its delays are not known"
        for group, leader in look.leaders().items()
        if leader is None
    ]
    rows = {topic: sorted(known.value.items()) for topic, known in kept.items()}
    return console.page(
        request,
        "waiting.html.j2",
        "Delayed and transactional messages",
        problems=[*without_leader, *ask.problems],
        levels=level_rows(look, settings.value.get(DELAY_LEVELS, "")),
        timers=rows[TIMER_TOPIC],
        halves=rows[HALF_TOPIC],
        decided=sum(end - first for _, (first, end) in rows[OP_HALF_TOPIC]),
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
    names = sorted({*producers.value, *known.value})
    page = paged(names, request.query_params.get("page"), q=query)
    async with asking() as ask_groups:
        consumers = {
            group: ask_groups(
                partial(console.admin.consumer_connection, group), f"clients of {group}", None
            )
            for group in page.rows
            if group in known.value
        }
    return console.page(
        request,
        "clients.html.j2",
        "Clients",
        problems=[*ask.problems, *ask_groups.problems[:3]],
        producers={g: producers.value[g] for g in page.rows if g in producers.value},
        consumers={g: c.value.connection_set for g, c in consumers.items() if c.value is not None},
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
    admin = console.admin
    asked = (
        ("Brokers", brokers, admin.broker_settings),
        ("NameServers", look.name_servers, admin.name_server_settings),
    )
    async with asking() as ask:
        answers = [
            (title, {a: ask(partial(of, a), f"settings of {a}", dict[str, str]()) for a in daemons})
            for title, daemons, of in asked
        ]
    shown = []
    for title, found in answers:
        rows = setting_rows({a: known.value for a, known in found.items() if not known.problem})
        kept = [row for row in rows if row.differs or not only_differing]
        shown.append((title, [r for r in kept if query.lower() in r.key.lower()], len(rows)))
    return console.page(
        request,
        "settings.html.j2",
        "Settings",
        problems=ask.problems,
        tables=shown,
        query=query,
        only_differing=only_differing,
    )
