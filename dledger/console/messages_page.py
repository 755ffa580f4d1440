"""Messages: found by key, id, time or place, and the way of one message through the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
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
from dledger.console.texts import BodyText, body_text

FOUND_MAX: Final = 64
"""Messages of one search: a broker's own limit for a key."""
QUEUE_ROWS: Final = 20
"""Messages of one page of a queue."""
HEAD_CHARACTERS: Final = 120
"""Of a body in a list."""
GROUPS_FOLLOWED: Final = 16
"""Consumer groups whose retries and dead letters are searched for one message."""
Search = Callable[[], Awaitable[list[MessageExt]]]

LANE_WIDTH: Final = 400
MINUTE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One message of a list."""

    address: str
    stored_ms: int
    message_id: str
    place: str
    tags: str
    keys: str
    size_bytes: int
    head: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a message's way.

    Attributes:
        lane: What took part: a producer, a broker, a consumer group.
        kind: ``sent``, ``stored``, ``delivered``, ``retried``, ``dead``, ``decided``.
        took_ms: How long it took; None: not known, or no span.
        is_bad: It failed, or the message was given up.
    """

    at_ms: int
    lane: str
    kind: str
    text: str
    took_ms: int | None = None
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A step in the picture of its lane: where it begins, and how wide it is."""

    x: float
    width: float
    step: Step


def place_of(message: MessageExt) -> str:
    """Return the address of a message's page."""
    if message.broker_name:
        place = {
            "topic": message.topic,
            "broker": message.broker_name,
            "queue": message.queue_id,
            "offset": message.queue_offset,
        }
    else:
        place = {"at": message.offset_message_id}
    return f"/message?{urlencode(place)}"


def message_row(message: MessageExt) -> MessageRow:
    """Return what a list shows of a message."""
    body = message.body_bytes
    shown = body_text(body[: HEAD_CHARACTERS * 4])
    head = shown.text if shown.kind == "text" else f"{len(body):,} bytes that are no text"
    return MessageRow(
        place_of(message),
        message.store_timestamp_ms,
        message.message_id,
        f"{message.broker_name or 'queue'} / {message.queue_id} / {message.queue_offset}",
        message.tags,
        message.keys,
        len(body),
        " ".join(head.split())[:HEAD_CHARACTERS],
    )


def way_of(
    message: MessageExt,
    trace: Iterable[TraceContext],
    retries: Mapping[str, Sequence[MessageExt]],
    letters: Mapping[str, Sequence[MessageExt]],
) -> list[Step]:
    """Return the steps of a message, in order of time. Pure.

    Args:
        trace: What clients reported; without trace the log itself still knows some steps.
        retries: Consumer group → copies of the message in its retry topic.
        letters: Consumer group → copies in its dead letter topic.
    """
    host, port = message.born_host
    steps = [
        Step(message.born_timestamp_ms, f"client {host}", "sent", f"by {host}:{port}"),
        Step(
            message.store_timestamp_ms,
            f"broker {message.broker_name}".strip(),
            "stored",
            f"{message.topic}, queue {message.queue_id}, offset {message.queue_offset}",
        ),
    ]
    for copies, kind, word in (
        (retries, "retried", "try"),
        (letters, "dead", "given up after try"),
    ):
        steps += [
            Step(
                copy.store_timestamp_ms,
                f"group {group}",
                kind,
                f"{word} {copy.reconsume_times + (kind == 'retried')}, offset {copy.queue_offset}",
                is_bad=kind == "dead",
            )
            for group, found in copies.items()
            for copy in found
        ]
    return sorted([*steps, *_reported(trace)], key=lambda step: step.at_ms)


def _reported(trace: Iterable[TraceContext]) -> list[Step]:
    found: list[Step] = []
    begun: dict[str, TraceContext] = {}
    ended: dict[str, TraceContext] = {}
    for step in trace:
        match step.trace_type:
            case TraceType.PUB:
                text = "stored" if step.is_success else "not as safe as asked for"
                lane = f"producer {step.group_name}"
                found.append(
                    Step(
                        step.time_stamp_ms,
                        lane,
                        "sent",
                        text,
                        step.cost_time_ms,
                        not step.is_success,
                    )
                )
            case TraceType.END_TRANSACTION:
                state = step.beans[0].transaction_state
                lane = f"producer {step.group_name}"
                found.append(Step(step.time_stamp_ms, lane, "decided", state))
            case TraceType.SUB_BEFORE:
                begun[step.request_id] = step
            case TraceType.SUB_AFTER:
                ended[step.request_id] = step
    for request_id, first in begun.items():
        last = ended.get(request_id)
        tried = first.beans[0].retry_times + 1
        result = "no end is known" if last is None else "success" if last.is_success else "failed"
        found.append(
            Step(
                first.time_stamp_ms,
                f"group {first.group_name}",
                "delivered",
                f"try {tried}: {result}",
                None if last is None else last.cost_time_ms,
                last is not None and not last.is_success,
            )
        )
    return found


def lanes_of(steps: Sequence[Step]) -> dict[str, list[Mark]]:
    """Return the marks of each lane, in the order in which the lanes begin. Pure."""
    if not steps:
        return {}
    first = steps[0].at_ms
    span = max(1, *(step.at_ms + (step.took_ms or 0) - first for step in steps))
    scale = (LANE_WIDTH - 8) / span
    lanes: dict[str, list[Mark]] = {}
    for step in steps:
        mark = Mark((step.at_ms - first) * scale, max(6.0, (step.took_ms or 0) * scale), step)
        lanes.setdefault(step.lane, []).append(mark)
    return lanes


# ----------------------------------------------------------------------------------- search


async def messages(request: Request) -> Response:
    """Search messages; without a search show the forms."""
    console: Console = request.app.state.console
    asked = dict(request.query_params)
    found: list[MessageExt] = []
    problems: list[str] = []
    newer: str | None = None
    older: str | None = None
    if asked.get("by"):
        try:
            searches = _searches(console.admin, asked)
        except RefusedError as error:
            problems = [str(error)]
        else:
            async with asking() as ask:
                answers = [ask(search, what, list[MessageExt]()) for what, search in searches]
            problems = ask.problems
            found = [message for known in answers for message in known.value]
            if asked["by"] == "id" and found:
                problems = []
    if asked.get("by") == "queue" and not problems:
        offset = int(asked["offset"])
        if offset > 0:
            older = "?" + urlencode(asked | {"offset": max(0, offset - QUEUE_ROWS)})
        if len(found) == QUEUE_ROWS:
            newer = "?" + urlencode(asked | {"offset": found[-1].queue_offset + 1})
    unique = {(m.broker_name, m.phy_offset, m.topic): m for m in found}
    return console.page(
        request,
        "messages.html.j2",
        "Messages",
        problems=problems,
        asked=asked,
        rows=[message_row(message) for message in unique.values()],
        older=older,
        newer=newer,
        found_max=FOUND_MAX,
    )


def _searches(admin: Admin, asked: Mapping[str, str]) -> list[tuple[str, Search]]:
    """Return what to ask brokers for a search, with a name for each question.

    Raises:
        RefusedError: Something is missing in it.
    """
    topic, wanted = asked.get("topic", "").strip(), asked.get("wanted", "").strip()
    match asked["by"]:
        case "key" if topic and wanted:
            return [("the search", partial(admin.query_messages, topic, wanted))]
        case "id" if wanted:
            by_key = partial(admin.query_unique_key, topic, wanted)
            at_place = partial(_at_place, admin, wanted)
            return [
                ("the id as a place", at_place),
                *([(f"the id in {topic}", by_key)] * bool(topic)),
            ]
        case "time" if topic:
            begin_ms = texts.time_ms(asked.get("from", ""))
            if begin_ms is None:
                raise RefusedError("from: a date and time (UTC) is needed")
            end_ms = texts.time_ms(asked.get("until", "")) or begin_ms + MINUTE_MS
            by_time = partial(admin.messages_by_time, topic, begin_ms, end_ms, FOUND_MAX)
            return [("the search", by_time)]
        case "queue" if topic:
            queue = _queue(asked)
            return [
                ("the queue", partial(admin.read_queue, queue, int(asked["offset"]), QUEUE_ROWS))
            ]
    raise RefusedError("a topic and what to search for are needed")


def _queue(asked: Mapping[str, str]) -> MessageQueue:
    queue, offset = texts.whole(asked.get("queue", "")), texts.whole(asked.get("offset", ""))
    if queue is None or offset is None:
        raise RefusedError("queue and offset are numbers from 0 on")
    return MessageQueue(asked.get("topic", ""), asked.get("broker", ""), queue)


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
    asked = request.query_params
    admin = console.admin
    nothing = list[MessageExt]()
    search: Search
    if asked.get("at"):
        search = partial(_at_place, admin, asked["at"])
    else:
        search = partial(admin.read_queue, _queue(asked), int(asked["offset"]), 1)
    async with asking() as ask:
        known = ask(search, "the message", nothing)
    if not known.value:
        text = "" if known.problem else "There is no such message now: it may have expired."
        return console.page(
            request, "message.html.j2", "No message", status=404, problems=ask.problems, text=text
        )
    found = known.value[0]
    if not asked.get("at") and found.queue_offset != int(asked["offset"]):
        text = f"Offset {asked['offset']} is no longer kept; the first is {found.queue_offset}."
        return console.page(request, "message.html.j2", "No message", status=404, text=text)
    async with asking() as ask_way:
        lags = ask_way(admin.lags, "the groups that read it", dict[str, dict[str, int]]())
        trace = ask_way(
            partial(_trace, admin, found.message_id, console.settings.trace_topic),
            "trace",
            list[TraceContext](),
        )
    groups = [group for group, lag in lags.value.items() if found.topic in lag][:GROUPS_FOLLOWED]
    async with asking() as ask_copies:
        retries, letters = (
            {
                group: ask_copies(
                    partial(_copies, admin, prefix + group, found.message_id), "copies", nothing
                )
                for group in groups
            }
            for prefix in ("%RETRY%", "%DLQ%")
        )
    steps = way_of(
        found,
        trace.value,
        {group: copies.value for group, copies in retries.items()},
        {group: copies.value for group, copies in letters.items()},
    )
    return console.page(
        request,
        "one_message.html.j2",
        "Message",
        problems=[*ask_way.problems, *ask_copies.problems[:3]],
        message=found,
        offset_message_id=found.offset_message_id,
        properties=sorted(found.properties.items()),
        body=_body(found),
        steps=steps,
        lanes=lanes_of(steps),
        lane_width=LANE_WIDTH,
        has_trace=bool(trace.value),
        groups=groups,
    )


def _body(found: MessageExt) -> BodyText:
    return body_text(found.body_bytes)


async def _trace(admin: Admin, message_id: str, topic: str) -> list[TraceContext]:
    try:
        return await admin.message_trace(message_id, trace_topic=topic)
    except NoRouteError:
        return []  # no broker has the topic of traces: no client reported any


async def _copies(admin: Admin, topic: str, message_id: str) -> list[MessageExt]:
    try:
        return await admin.query_unique_key(topic, message_id)
    except NoRouteError:
        return []  # the group never gave a message back, or up
