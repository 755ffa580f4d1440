"""Topics: a long list with its search, one topic with its queues, and changes of topics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin, TopicConfig
from dledger.client.core.route import MessageQueue
from dledger.console import texts
from dledger.console.console import Console, Form, RefusedError, change
from dledger.console.known import Asks, Known, asking
from dledger.console.texts import paged
from dledger.remoting.protocol.topic_names import is_system

RETENTION: Final = "retention.ms"
HOUR_MS: Final = 3_600_000
_HOURS: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")
PERMISSIONS: Final = {"6": "read and write", "4": "read only", "2": "write only", "0": "neither"}


class TopicRow(NamedTuple):
    """One topic of the list, over all broker groups; each text may be that they differ."""

    name: str
    groups: list[str]
    queues: int | None
    permission: str
    kept: str
    is_ordered: bool


def permission_text(perm: int) -> str:
    """Return what may be done with a topic."""
    return PERMISSIONS[str(perm & 6)]


def kept_text(config: TopicConfig) -> str:
    """Return how long messages of a topic are kept."""
    kept_ms = config.attributes.get(RETENTION)
    return "as the log" if kept_ms is None else texts.duration_text(float(kept_ms))


def topic_row(name: str, configs: Mapping[str, TopicConfig]) -> TopicRow:
    """Return what the list shows of a topic, as each broker group has it. Pure."""
    permission, kept = (
        "differs between groups" if len(found) > 1 else next(iter(found), "not known")
        for found in (
            {permission_text(config.perm) for config in configs.values()},
            {kept_text(config) for config in configs.values()},
        )
    )
    queues = sum(config.write_queue_nums for config in configs.values()) if configs else None
    is_ordered = any(config.order for config in configs.values())
    return TopicRow(name, sorted(configs), queues, permission, kept, is_ordered)


async def topics(request: Request) -> Response:
    """Show the topics, page by page."""
    console: Console = request.app.state.console
    look = await console.newest_look()
    query = request.query_params.get("q", "")
    with_system = request.query_params.get("system") == "1"
    async with asking() as ask:
        names = ask(console.admin.topic_list, "the list of topics", list[str]())
        info = ask(console.admin.cluster_info, "the names of clusters", None)
        tables = _tables(console.admin, ask, look.groups)
    own = set(look.groups) | set(() if info.value is None else info.value.cluster_addr_table)
    # Without a NameServer the leaders' own tables still name the topics.
    known = sorted({*names.value, *(name for table in tables.values() for name in table.value)})
    shown = [name for name in known if with_system or not is_system(name, own)]
    system = "1" if with_system else ""
    page = paged(shown, request.query_params.get("page"), q=query, system=system)
    rows = [
        topic_row(name, {group: t.value[name] for group, t in tables.items() if name in t.value})
        for name in page.rows
    ]
    return console.page(
        request,
        "topics.html.j2",
        "Topics",
        problems=ask.problems,
        rows=rows,
        listing=page,
        query=query,
        with_system=with_system,
    )


def _tables(
    admin: Admin, ask: Asks, groups: Iterable[str]
) -> dict[str, Known[dict[str, TopicConfig]]]:
    return {
        group: ask(
            partial(admin.topic_configs, group), f"the topics of {group}", dict[str, TopicConfig]()
        )
        for group in groups
    }


async def topic(request: Request) -> Response:
    """Show one topic: queues and offsets, permission, retention, and the groups that read it."""
    console: Console = request.app.state.console
    name = request.query_params.get("name", "")
    look = await console.newest_look()
    async with asking() as ask:
        bounds = ask(
            partial(console.admin.offsets, name),
            "queues and offsets",
            dict[MessageQueue, tuple[int, int]](),
        )
        tables = _tables(console.admin, ask, look.groups)
        lags = ask(console.admin.lags, "the groups that read it", dict[str, dict[str, int]]())
    configs = {group: t.value[name] for group, t in tables.items() if name in t.value}
    readers = {group: lag[name] for group, lag in lags.value.items() if name in lag}
    is_known = bool(configs) or not any(not table.problem for table in tables.values())
    kept = next((config.attributes.get(RETENTION) for config in configs.values()), None)
    return console.page(
        request,
        "topic.html.j2",
        f"Topic {name}",
        status=200 if is_known else 404,
        problems=ask.problems if is_known else [],
        name=name,
        is_known=is_known,
        configs=dict(sorted(configs.items())),
        permission_text=permission_text,
        permissions=PERMISSIONS,
        retention_hours="" if not kept or not kept.isdigit() else f"{int(kept) / HOUR_MS:g}",
        queues=sorted(bounds.value.items()),
        messages=sum(end - first for first, end in bounds.value.values()),
        readers=dict(sorted(readers.items())),
        is_system=is_system(name, look.groups),
    )


# ----------------------------------------------------------------------------------- changes


def _number(form: Form, field: str, least: int, most: int) -> int:
    number = texts.whole(form.get(field, ""))
    if number is None or not least <= number <= most:
        raise RefusedError(f"{field.replace('_', ' ')}: a number from {least} to {most}")
    return number


def retention_ms(form: Form) -> str | None:
    """Return how long the topic of a form keeps messages; None: as long as the log."""
    text = form.get("retention_hours", "").strip()
    if not text:
        return None
    kept_ms = int(float(text) * HOUR_MS) if _HOURS.fullmatch(text) else 0
    if not kept_ms:
        raise RefusedError("retention: hours above 0, or nothing for as long as the log")
    return str(kept_ms)


def _page_of(form: Form) -> str:
    return f"/topic?{urlencode({'name': form.get('name', '')})}"


@change(lambda form: f"create topic {form.get('name', '')}", _page_of)
async def create_topic(admin: Admin, form: Form) -> str:
    """Create a topic."""
    name = form.get("name", "")
    if name in await admin.topic_list():
        raise RefusedError(f"{name} exists already; nothing was changed")
    kept = retention_ms(form)
    groups = await admin.create_topic(
        name,
        queue_nums=_number(form, "queues", 1, 1024),
        attributes=None if kept is None else {RETENTION: kept},
    )
    return f"it is in {', '.join(groups)}"


@change(
    lambda form: (
        f"change topic {form.get('name', '')}: write queues {form.get('write_queues')},"
        f" read queues {form.get('read_queues')}, permission {form.get('permission')},"
        f" retention {form.get('retention_hours') or 'as the log'}"
    ),
    _page_of,
)
async def update_topic(admin: Admin, form: Form) -> str:
    """Change queues, permission and retention of a topic."""
    name, done = form.get("name", ""), []
    for group in sorted((await admin.topic_route(name)).addresses):
        config = (await admin.topic_configs(group)).get(name)
        if config is None:
            continue
        done += await admin.update_topic(
            name,
            queue_nums=_number(form, "write_queues", 0, 1024),
            read_queue_nums=_number(form, "read_queues", 0, 1024),
            perm=_number(form, "permission", 0, 7),
            order=config.order,
            attributes={RETENTION: retention_ms(form)},
            broker_names=(group,),
            gives_up_messages=form.get("gives_up_messages") == "1",
        )
    return f"changed in {', '.join(done)}"


@change(lambda form: f"delete topic {form.get('name', '')}", lambda form: "/topics")
async def delete_topic(admin: Admin, form: Form) -> str:
    """Delete a topic whose name was typed once more."""
    name = form.get("name", "")
    if form.get("again") != name:
        raise RefusedError("the name that was typed is another one; nothing was deleted")
    if is_system(name):
        raise RefusedError("brokers need this topic; nothing was deleted")
    return f"deleted in {', '.join(await admin.delete_topic(name))}"
