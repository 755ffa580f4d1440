"""Messages: found by key, id, time or place, and the way of one message through the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.client.core.errors import MessageIllegalError, NoRouteError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.trace import TraceContext, TraceType
from dledger.console import texts
from dledger.console.console import Console, RefusedError
from dledger.console.known import asking
from dledger.remoting.addresses import join_address

FOUND_MAX: Final = 64
"""Messages of one search: a broker's own limit for a key."""
QUEUE_ROWS: Final = 20
"""Messages of one page of a queue."""
HEAD_CHARACTERS: Final = 120
"""Of a body in a list."""
GROUPS_FOLLOWED: Final = 16
"""Consumer groups whose retries and dead letters are searched for one message."""
MINUTE_MS: Final = 60_000

Search = Callable[[], Awaitable[list[MessageExt]]]
Copies = Mapping[str, Sequence[MessageExt]]
"""Copies of a message by consumer group."""


class Step(NamedTuple):
    """One step of a message's way.

    Attributes:
        kind: ``sent``, ``stored``, ``delivered``, ``retried``, ``dead``, ``decided``.
        took_ms: How long it took; None: not known, or no span.
    """

    at_ms: int
    part: str
    kind: str
    text: str
    took_ms: int | None = None
    is_bad: bool = False


def address_of(message: MessageExt) -> str:
    """Return the address of a message's page."""
    if not message.broker_name:
        return f"/message?{urlencode({'at': message.offset_message_id})}"
    names = ("topic", "broker", "queue", "offset")
    place = (message.topic, message.broker_name, message.queue_id, message.queue_offset)
    return f"/message?{urlencode(dict(zip(names, place, strict=True)))}"


def head_of(message: MessageExt) -> str:
    """Return the beginning of a message's body, on one line."""
    head = texts.body_text(message.body_bytes[: HEAD_CHARACTERS * 4])
    return " ".join(head.split())[:HEAD_CHARACTERS]


def way_of(
    message: MessageExt, trace: Iterable[TraceContext], retries: Copies, letters: Copies
) -> list[Step]:
    """Return the steps of a message, in order of time. Pure.

    *trace*: what clients reported; without trace the log itself still knows some steps.
    """
    client = join_address(*message.born_host)
    place = f"{message.topic}, queue {message.queue_id}, offset {message.queue_offset}"
    broker = f"broker {message.broker_name}".strip()
    steps = [
        Step(message.born_timestamp_ms, f"client {message.born_host[0]}", "sent", f"by {client}"),
        Step(message.store_timestamp_ms, broker, "stored", place),
        *_reported(trace),
    ]
    for group, copies in retries.items():
        for copy in copies:
            text = f"try {copy.reconsume_times + 1}, offset {copy.queue_offset}"
            how = "retried" if copy.reconsume_times else "given back"
            steps.append(Step(copy.store_timestamp_ms, f"group {group}", how, text))
    for group, copies in letters.items():
        for copy in copies:
            text = f"given up after try {copy.reconsume_times}, offset {copy.queue_offset}"
            at_ms = copy.store_timestamp_ms
            steps.append(Step(at_ms, f"group {group}", "dead", text, is_bad=True))
    return sorted(steps, key=lambda step: step.at_ms)


def _reported(trace: Iterable[TraceContext]) -> list[Step]:
    steps: list[Step] = []
    begun: list[TraceContext] = []
    ended: dict[str, TraceContext] = {}
    for one in trace:
        at_ms, producer = one.time_stamp_ms, f"producer {one.group_name}"
        match one.trace_type:
            case TraceType.PUB:
                text = "stored" if one.is_success else "not as safe as asked for"
                bad = not one.is_success
                steps.append(Step(at_ms, producer, "sent", text, one.cost_time_ms, bad))
            case TraceType.END_TRANSACTION:
                state = one.beans[0].transaction_state
                steps.append(Step(at_ms, producer, "decided", state))
            case TraceType.SUB_BEFORE:
                begun.append(one)
            case TraceType.SUB_AFTER:
                ended[one.request_id] = one
    for first in begun:
        last = ended.get(first.request_id)
        result, took_ms, bad = "no end is known", None, False
        if last is not None:
            result = "success" if last.is_success else "failed"
            took_ms, bad = last.cost_time_ms, not last.is_success
        text = f"try {first.beans[0].retry_times + 1}: {result}"
        group = f"group {first.group_name}"
        steps.append(Step(first.time_stamp_ms, group, "delivered", text, took_ms, bad))
    return steps


# ----------------------------------------------------------------------------------- search


async def messages(request: Request) -> Response:
    """Search messages; without a search show the forms."""
    console: Console = request.app.state.console
    asked = dict(request.query_params)
    rows: list[MessageExt] = []
    problems: list[str] = []
    newer = older = None
    if asked.get("by"):
        try:
            searches = _searches(console.admin, asked)
        except RefusedError as error:
            problems = [str(error)]
        else:
            async with asking() as ask:
                answers = [ask(search, what, list[MessageExt]()) for what, search in searches]
            rows = [message for known in answers for message in known.value]
            problems = [] if asked["by"] == "id" and rows else ask.problems
    if asked.get("by") == "queue" and not problems:
        offset = int(asked["offset"])
        if offset > 0:
            older = "?" + urlencode(asked | {"offset": max(0, offset - QUEUE_ROWS)})
        if len(rows) == QUEUE_ROWS:
            newer = "?" + urlencode(asked | {"offset": rows[-1].queue_offset + 1})
    unique = {(m.broker_name, m.phy_offset, m.topic): m for m in rows}
    return console.page(
        request,
        "messages.html.j2",
        "Messages",
        problems=problems,
        asked=asked,
        rows=[(address_of(message), message, head_of(message)) for message in unique.values()],
        older=older,
        newer=newer,
        found_max=FOUND_MAX,
    )


def _searches(admin: Admin, asked: Mapping[str, str]) -> list[tuple[str, Search]]:
    """Return what to ask brokers for a search, with a name for each question.

    Raises RefusedError: something is missing in it.
    """
    topic, wanted = asked.get("topic", "").strip(), asked.get("wanted", "").strip()
    match asked["by"]:
        case "key" if topic and wanted:
            return [("the search", partial(admin.query_messages, topic, wanted))]
        case "id" if wanted:
            at_place: Search = partial(_at_place, admin, wanted)
            by_key: Search = partial(admin.query_unique_key, topic, wanted)
            searches = [("the id as a place", at_place), (f"the id in {topic}", by_key)]
            return searches if topic else searches[:1]
        case "time" if topic:
            begin_ms = texts.time_ms(asked.get("from", ""))
            if begin_ms is None:
                raise RefusedError("from: a date and time (UTC) is needed")
            end_ms = texts.time_ms(asked.get("until", "")) or begin_ms + MINUTE_MS
            by_time = partial(admin.messages_by_time, topic, begin_ms, end_ms, FOUND_MAX)
            return [("the search", by_time)]
        case "queue" if topic:
            return [("the queue", partial(admin.read_queue, *_place(asked), QUEUE_ROWS))]
    raise RefusedError("a topic and what to search for are needed")


def _place(asked: Mapping[str, str]) -> tuple[MessageQueue, int]:
    queue, offset = texts.whole(asked.get("queue", "")), texts.whole(asked.get("offset", ""))
    if queue is None or offset is None:
        raise RefusedError("queue and offset are numbers from 0 on")
    return MessageQueue(asked.get("topic", ""), asked.get("broker", ""), queue), offset


async def _at_place(admin: Admin, wanted: str) -> list[MessageExt]:
    """Return the message that an offset message id names; none where it is no such id."""
    try:
        return [await admin.view_message(wanted)]
    except MessageIllegalError:
        return []


# ----------------------------------------------------------------------------------- one message


async def message(request: Request) -> Response:
    """Show one message: where it is, its properties and body, and its way."""
    console: Console = request.app.state.console
    asked, admin = request.query_params, console.admin
    nothing, offset = list[MessageExt](), None
    search: Search = partial(_at_place, admin, asked.get("at", ""))
    if not asked.get("at"):
        queue, offset = _place(asked)
        search = partial(admin.read_queue, queue, offset, 1)
    async with asking() as ask:
        known = ask(search, "the message", nothing)
    text = "" if known.problem else "There is no such message now: it may have expired."
    if known.value and offset not in (None, known.value[0].queue_offset):
        text = f"Offset {offset} is no longer kept; the first is {known.value[0].queue_offset}."
    elif known.value:
        return await _shown(request, console, known.value[0])
    return console.page(
        request, "message.html.j2", "No message", status=404, problems=ask.problems, text=text
    )


async def _shown(request: Request, console: Console, message: MessageExt) -> Response:
    admin, message_id = console.admin, message.message_id
    async with asking() as ask_way:
        lags = ask_way(admin.lags, "the groups that read it", dict[str, dict[str, int]]())
        reported = partial(
            admin.message_trace, message_id, trace_topic=console.settings.trace_topic
        )
        trace = ask_way(partial(or_none, reported), "trace", list[TraceContext]())
    groups = [group for group, lag in lags.value.items() if message.topic in lag][:GROUPS_FOLLOWED]
    async with asking() as ask_copies:
        retries, letters = (
            {
                group: ask_copies(
                    partial(or_none, partial(admin.query_unique_key, prefix + group, message_id)),
                    "copies",
                    list[MessageExt](),
                )
                for group in groups
            }
            for prefix in ("%RETRY%", "%DLQ%")
        )
    steps = way_of(
        message,
        trace.value,
        {group: copies.value for group, copies in retries.items()},
        {group: copies.value for group, copies in letters.items()},
    )
    return console.page(
        request,
        "one_message.html.j2",
        "Message",
        problems=[*ask_way.problems, *ask_copies.problems[:3]],
        message=message,
        offset_message_id=message.offset_message_id,
        properties=sorted(message.properties.items()),
        body=texts.body_text(message.body_bytes),
        body_shown=texts.BODY_SHOWN_BYTES,
        steps=steps,
        has_trace=bool(trace.value),
        groups=groups,
    )


async def or_none(question: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
    """Return what *question* does; nothing where no broker has the topic that it asks for."""
    try:
        return await question()
    except NoRouteError:
        return []  # no broker has the topic: no client sent a trace, or gave a message back or up
