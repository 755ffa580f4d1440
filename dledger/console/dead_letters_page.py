"""Dead letters: what groups gave up, read, and given back to them, some or all."""

from __future__ import annotations

from functools import partial
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.client.admin.messages import times_given_back
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.properties import PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC
from dledger.console import texts
from dledger.console.console import Console, Form, RefusedError, change
from dledger.console.known import asking
from dledger.console.messages_page import address_of, head_of, or_none
from dledger.console.texts import paged
from dledger.remoting.protocol.topic_names import DLQ_PREFIX

LETTERS_SHOWN: Final = 20
"""Dead letters of one page of a group."""


def origin_of(letter: MessageExt) -> str:
    """Return the topic that a dead letter was first sent to; empty: not known."""
    properties = letter.properties
    return properties.get(PROPERTY_DLQ_ORIGIN_TOPIC) or properties.get(PROPERTY_RETRY_TOPIC, "")


def place_of(text: str) -> tuple[str, int, int] | None:
    """Return broker group, queue and offset that *text* names as a letter's key does."""
    broker, queue, offset = [*text.split("/"), "", "", ""][:3]
    numbers = texts.whole(queue), texts.whole(offset)
    if not broker or None in numbers:
        return None
    return broker, numbers[0] or 0, numbers[1] or 0


def chosen(form: Form) -> list[tuple[str, int, int]]:
    """Return broker group, queue and offset of the letters that were ticked.

    Raises RefusedError: a field is none.
    """
    found = []
    for name, value in form.items():
        if name.startswith("letter_"):
            place = place_of(value)
            if place is None:
                raise RefusedError("a letter is named by broker group, queue and offset")
            found.append(place)
    return found


async def dead_letters(request: Request) -> Response:
    """Show the groups that have dead letters, page by page."""
    console: Console = request.app.state.console
    query = request.query_params.get("q", "")
    async with asking() as ask:
        topics = ask(console.admin.topic_list, "the list of topics", list[str]())
    names = [
        topic.removeprefix(DLQ_PREFIX) for topic in topics.value if topic.startswith(DLQ_PREFIX)
    ]
    page = paged(names, request.query_params.get("page"), q=query)
    async with asking() as ask_groups:
        found = {
            name: ask_groups(
                partial(console.admin.dead_letter_group, name), f"dead letters of {name}", None
            )
            for name in page.rows
        }
    return console.page(
        request,
        "dead_letters.html.j2",
        "Dead letters",
        problems=[*ask.problems, *ask_groups.problems[:3]],
        rows=[(name, known.value) for name, known in found.items()],
        listing=page,
        query=query,
        letters_known=not topics.problem,
    )


async def dead_letter_group(request: Request) -> Response:
    """Show the dead letters of one group from a place on."""
    console: Console = request.app.state.console
    name = request.query_params.get("name", "")
    begin = None
    if (place := place_of(request.query_params.get("from", ""))) is not None:
        begin = MessageQueue(DLQ_PREFIX + name, *place[:2]), place[2]

    async def read() -> list[tuple[MessageQueue, MessageExt]]:
        letters = console.admin.dead_letters(name, limit=LETTERS_SHOWN, begin=begin)
        return [pair async for pair in letters]

    async with asking() as ask:
        letters = ask(read, "the letters", list[tuple[MessageQueue, MessageExt]]())
        counts = ask(partial(console.admin.dead_letter_group, name), "how many there are", None)
    async with asking() as ask_copies:
        retried = partial(console.admin.query_unique_key, "%RETRY%" + name)
        copies = [
            ask_copies(
                partial(or_none, partial(retried, letter.message_id)), "copies", list[MessageExt]()
            )
            for _, letter in letters.value
        ]
    following = None
    if len(letters.value) == LETTERS_SHOWN:
        queue, last = letters.value[-1]
        following_place = f"{queue.broker_name}/{queue.queue_id}/{last.queue_offset + 1}"
        following = f"?{urlencode({'name': name, 'from': following_place})}"
    return console.page(
        request,
        "dead_letter_group.html.j2",
        f"Dead letters of {name}",
        problems=[*ask.problems, *ask_copies.problems[:1]],
        name=name,
        rows=[
            (queue, letter, address_of(letter), origin_of(letter), head_of(letter), given_back)
            for (queue, letter), given_back in zip(
                letters.value, (times_given_back(each.value) for each in copies), strict=True
            )
        ],
        counts=counts.value,
        is_first=begin is None,
        following=following,
    )


def _what_is_given_back(form: Form) -> str:
    which = "all new" if form.get("which") == "all" else str(len(chosen(form)))
    return f"give {which} dead letters back to {form.get('name', '')}"


@change(
    _what_is_given_back,
    lambda form: f"/dead-letters/group?{urlencode({'name': form.get('name', '')})}",
)
async def resend(admin: Admin, form: Form) -> str:
    """Give the ticked letters back to their group, or all that were not given back yet."""
    name = form.get("name", "")
    if form.get("which") == "all":
        return f"{await admin.resend_dead_letters(name)} given back"
    letters, done = chosen(form), 0
    if not letters:
        raise RefusedError("no letter is ticked; nothing was given back")
    for broker, queue_id, offset in letters:
        queue = MessageQueue(DLQ_PREFIX + name, broker, queue_id)
        done += await admin.resend_dead_letters(name, offset=offset, queue=queue)
    if done < len(letters):
        raise RefusedError(f"{done} of {len(letters)} given back: the others are not kept")
    return f"{done} given back"
