"""Consumer groups: how far they are behind, in messages and in time, and resets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlencode

import trio
from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import FIRST_MS, LAST_MS, OffsetMove
from dledger.client.admin.messages import RESEND_GROUP_PREFIX
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.console import texts
from dledger.console.console import Console, Form, RefusedError, change
from dledger.console.known import asking
from dledger.console.texts import paged
from dledger.remoting.protocol.bodies import (
    ConsumerConnection,
    OffsetWrapper,
    SubscriptionGroupConfig,
)
from dledger.remoting.protocol.topic_names import RETRY_PREFIX, SYSTEM_GROUPS

OLDEST_LOOKED_AT: Final = 64
"""Queues of a group whose oldest unread message is read for its time; one request each."""
MODELS: Final = {"CLUSTERING": "shared", "BROADCASTING": "each client gets all"}


class GroupRow(NamedTuple):
    """One consumer group of the list; None: its clients, or its lag in messages, are not known."""

    name: str
    members: int | None
    model: str
    topics: tuple[str, ...]
    lag: int | None

    @property
    def is_stuck(self) -> bool:
        """Messages wait, and no member is there to take them."""
        return bool(self.lag) and self.members == 0


def is_system_group(name: str) -> bool:
    """Return whether a group belongs to brokers or tools, not to an application."""
    return name in SYSTEM_GROUPS or name.startswith(RESEND_GROUP_PREFIX)


def group_row(
    name: str, connection: ConsumerConnection | None, is_known: bool, lags: Mapping[str, int] | None
) -> GroupRow:
    """Return what the list shows of a group. Pure.

    Args:
        is_known: Whether *connection* is an answer; without clients it is None.
        lags: Messages still to come by topic; None: not known.
    """
    subscribed = set(() if connection is None else connection.subscription_table)
    named = sorted(t for t in subscribed | set(lags or ()) if not t.startswith(RETRY_PREFIX))
    members = 0 if connection is None else len(connection.connection_set)
    lag = None if lags is None else sum(lags.values())
    return GroupRow(name, members if is_known else None, model_text(connection), tuple(named), lag)


def model_text(connection: ConsumerConnection | None) -> str:
    """Return how the clients of a group share messages, in words."""
    if connection is None or connection.message_model is None:
        return ""
    model = str(connection.message_model.value)
    return MODELS.get(model, model)


async def oldest_unread(
    admin: Admin, progress: Mapping[MessageQueue, OffsetWrapper]
) -> dict[MessageQueue, int]:
    """Return when the oldest unread message of each queue was stored, those furthest behind first.

    A queue whose message cannot be read is left out.
    """
    lags = {q: said.broker_offset - said.consumer_offset for q, said in progress.items()}
    behind = sorted((q for q, lag in lags.items() if lag > 0), key=lambda q: -lags[q])
    oldest: dict[MessageQueue, int] = {}

    async def read(queue: MessageQueue) -> None:
        try:
            messages = await admin.read_queue(queue, progress[queue].consumer_offset, 1)
        except MQError:
            return
        oldest.update((queue, message.store_timestamp_ms) for message in messages)

    async with trio.open_nursery() as nursery:
        for queue in behind[:OLDEST_LOOKED_AT]:
            nursery.start_soon(read, queue)
    return oldest


async def groups(request: Request) -> Response:
    """Show the consumer groups, page by page."""
    console: Console = request.app.state.console
    admin, query = console.admin, request.query_params.get("q", "")
    with_system = request.query_params.get("system") == "1"
    async with asking() as ask:
        none = dict[str, SubscriptionGroupConfig]()
        known = ask(admin.subscription_groups, "the list of groups", none)
        lags = ask(admin.lags, "lag", dict[str, dict[str, int]]())
    names = sorted({*known.value, *lags.value})
    shown = [name for name in names if with_system or not is_system_group(name)]
    system = "1" if with_system else ""
    page = paged(shown, request.query_params.get("page"), q=query, system=system)
    async with asking() as ask_clients:
        clients = {
            name: ask_clients(partial(admin.consumer_connection, name), f"clients of {name}", None)
            for name in page.rows
        }
    rows = [
        group_row(
            name, said.value, not said.problem, None if lags.problem else lags.value.get(name, {})
        )
        for name, said in clients.items()
    ]
    return console.page(
        request,
        "groups.html.j2",
        "Consumer groups",
        problems=[*ask.problems, *ask_clients.problems[:3]],
        rows=rows,
        listing=page,
        query=query,
        with_system=with_system,
    )


async def group(request: Request) -> Response:
    """Show one group: members, which queue is whose, lag in messages and time."""
    console: Console = request.app.state.console
    admin, name = console.admin, request.query_params.get("name", "")
    async with asking() as ask:
        connection = ask(partial(admin.consumer_connection, name), "members", None)
        none = dict[MessageQueue, OffsetWrapper]()
        progress = ask(partial(admin.group_progress, name), "offsets and lag", none)
        unowned = dict[MessageQueue, str]()
        owners = ask(partial(admin.queue_owners, name), "which member has which queue", unowned)
        none_known = dict[str, SubscriptionGroupConfig]()
        configs = ask(admin.subscription_groups, "the list of groups", none_known)
    async with asking() as ask_oldest:
        unread = partial(oldest_unread, admin, progress.value)
        oldest = ask_oldest(unread, "lag in time", dict[MessageQueue, int]())
    unknown = []
    doubts = connection.problem or progress.problem or configs.problem
    if not (doubts or connection.value or progress.value or name in configs.value):
        unknown = [f"no broker knows a group {name}: see the list of groups"]
    now_ms = console.now_ms
    behind_ms = {queue: max(0, now_ms - at_ms) for queue, at_ms in oldest.value.items()}
    table = {} if connection.value is None else connection.value.subscription_table
    return console.page(
        request,
        "group.html.j2",
        f"Consumer group {name}",
        problems=[*unknown, *ask.problems, *ask_oldest.problems],
        name=name,
        connection=connection.value,
        connection_known=not connection.problem,
        model=model_text(connection.value),
        subscriptions=sorted(table.items()),
        rows=sorted(progress.value.items()),
        owners=owners.value,
        behind_ms=behind_ms,
        lag=sum(max(0, p.broker_offset - p.consumer_offset) for p in progress.value.values()),
        # What people move is rarely the retry topic.
        topics=sorted(
            {queue.topic for queue in progress.value} | set(table),
            key=lambda topic: (topic.startswith("%RETRY%"), topic),
        ),
    )


# ----------------------------------------------------------------------------------- reset


def reset_time(form: Form) -> int:
    """Return the time to reset to, as `Admin.reset_offsets` takes it.

    Raises RefusedError: there is none in the form.
    """
    match form.get("to"):
        case "first":
            return FIRST_MS
        case "last":
            return LAST_MS
        case "time" if at_ms := texts.time_ms(form.get("time", "")):
            return at_ms
    raise RefusedError("choose the first message, the end, or a date and time (UTC)")


async def plan_reset(request: Request) -> Response:
    """Show what a reset would do, queue by queue; nothing is changed."""
    console: Console = request.app.state.console
    form = dict(request.query_params)
    name, topic = form.get("name", ""), form.get("topic", "")
    time_ms, problems, moves = None, [], dict[MessageQueue, OffsetMove]()
    try:
        time_ms = reset_time(form)
    except RefusedError as error:
        problems = [str(error)]
    else:
        async with asking() as ask:
            plan = partial(console.admin.plan_offset_reset, name, topic, time_ms)
            known = ask(plan, "the plan", moves)
        problems, moves = ask.problems, known.value
    return console.page(
        request,
        "reset.html.j2",
        f"Move {name}",
        problems=problems,
        name=name,
        topic=topic,
        time_ms=time_ms,
        rows=sorted(moves.items()),
        form=form,
    )


def _what_moves(form: Form) -> str:
    to = form.get("time") if form.get("to") == "time" else form.get("to")
    return f"move group {form.get('name')} in {form.get('topic')} to {to}"


@change(_what_moves, lambda form: f"/group?{urlencode({'name': form.get('name', '')})}")
async def reset(admin: Admin, form: Form) -> str:
    """Move a group in a topic."""
    name, topic, time_ms = form.get("name", ""), form.get("topic", ""), reset_time(form)
    moves = await admin.plan_offset_reset(name, topic, time_ms)
    done = await admin.reset_offsets(name, topic, time_ms, moves)
    missing = [q for q in moves if q not in done.notified and q not in done.stored]
    if missing:
        raise RefusedError(f"{len(missing)} queues still have their old offsets: do it again")
    return (
        f"{len(done.notified)} queues through consumers that run, {len(done.stored)} stored"
        " where none is connected"
    )
