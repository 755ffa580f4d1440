"""``dledger dlq``: what consumer groups gave up, and giving it to them again."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dledger.cli.commands import Rows, listing, with_admin
from dledger.output import CliError, GroupName, Output, answer, note, show, utc

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.client.core.message_ext import MessageExt
    from dledger.client.core.route import MessageQueue

app = App(name="dlq", help="Show dead letters and give them back.", backend="trio")

SHOWN_MAX = 100
"""Dead letters that `show` prints unless an option names another number."""

BODY_SHOWN_CHARS = 80


@app.command
@listing(("group", "messages", "resent", "topic"))
async def ls(admin: Admin) -> Rows:
    """List the consumer groups that have dead letters."""
    return [
        {
            "group": found.group,
            "topic": found.topic,
            "messages": found.messages,
            "resent": found.resent,
        }
        for found in await admin.dead_letter_groups()
    ]


@app.command(name="show")
@with_admin
async def show_(
    admin: Admin,
    group: GroupName,
    /,
    *,
    offset: Annotated[int, Parameter(help="From this offset on.")] = 0,
    max_: Annotated[int, Parameter(name="--max", help="Most messages.")] = SHOWN_MAX,
    output: Output = "table",
) -> None:
    """Show the dead letters of a consumer group, oldest first."""
    from dledger.client.admin.messages import times_given_back
    from dledger.client.core.errors import NoRouteError

    rows = await _letters(admin, group, offset, max_)
    for row in rows:
        try:
            found = await admin.query_unique_key("%RETRY%" + group, row["message_id"])
        except NoRouteError:
            found = []
        row["given_back"] = times_given_back(found)
    if output != "json":
        for row in rows:
            row["body"] = row["body"][:BODY_SHOWN_CHARS]
    columns = ("broker", "queue", "offset", "origin_topic", "tries", "given_back", "stored")
    show(output, "", rows, (*columns, "message_id", "body"))


@app.command
@with_admin
async def resend(
    admin: Admin,
    group: GroupName,
    /,
    *,
    offset: Annotated[
        int | None,
        Parameter(help="Only the dead letter at this offset, even if it was sent again before."),
    ] = None,
    broker: Annotated[str | None, Parameter(help="Only those of this broker group.")] = None,
    queue: Annotated[int | None, Parameter(help="Only those of the queue with this id.")] = None,
    max_: Annotated[int | None, Parameter(name="--max", help="Most messages.")] = None,
    output: Output = "table",
) -> None:
    """Send dead letters to their group again: all that were not sent again yet."""
    from dledger.client.core.errors import NoRouteError
    from dledger.remoting.protocol.topic_names import DLQ_PREFIX

    try:
        found = await admin.topic_route(DLQ_PREFIX + group)
    except NoRouteError as error:
        raise _no_letters(group) from error
    done = 0
    for each in chosen_queues(found.subscribe_queues, broker, queue, offset):
        done += await admin.resend_dead_letters(
            group, offset=offset, limit=None if max_ is None else max_ - done, queue=each
        )
    answer(output, {"group": group, "resent": done}, f"{done} given back to {group}")


def chosen_queues(
    queues: Iterable[MessageQueue], broker: str | None, queue_id: int | None, offset: int | None
) -> list[MessageQueue]:
    """Return the queues of dead letters that options name, in their order.

    Raises CliError: there is none, or several where an offset is to name one dead letter.
    """
    chosen = sorted(
        queue
        for queue in queues
        if broker in (None, queue.broker_name) and queue_id in (None, queue.queue_id)
    )
    if not chosen:
        raise CliError("there is no such queue of dead letters", next_step="see dledger dlq show")
    if offset is not None and len(chosen) > 1:
        names = ", ".join(f"{queue.broker_name} queue {queue.queue_id}" for queue in chosen)
        raise CliError(
            f"offset {offset}: in several queues, {names}",
            next_step="choose one with --broker and --queue; nothing was sent",
        )
    return chosen


@app.command
@with_admin
async def export(
    admin: Admin,
    group: GroupName,
    /,
    *,
    to: Annotated[Path | None, Parameter(help="File to write; standard output otherwise.")] = None,
    offset: Annotated[int, Parameter(help="From this offset on.")] = 0,
    max_: Annotated[int | None, Parameter(name="--max", help="Most messages.")] = None,
) -> None:
    """Write dead letters as JSON lines; ``body_base64`` has a body that is no text."""
    import msgspec

    rows = await _letters(admin, group, offset, max_)
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    if to is None:
        sys.stdout.write(lines.decode())
    else:
        to.write_bytes(lines)
        note(f"{len(rows)} in {to}")


async def _letters(
    admin: Admin, group: str, offset: int, limit: int | None
) -> list[dict[str, Any]]:
    from dledger.client.core.errors import NoRouteError

    try:
        return [
            letter_row(queue, letter)
            async for queue, letter in admin.dead_letters(group, first_offset=offset, limit=limit)
        ]
    except NoRouteError as error:
        raise _no_letters(group) from error


def _no_letters(group: str) -> CliError:
    return CliError(f"{group} has no dead letters", next_step="see dledger dlq ls")


def letter_row(queue: MessageQueue, letter: MessageExt) -> dict[str, Any]:
    """Return what is shown of a dead letter."""
    properties = letter.properties
    row: dict[str, Any] = {
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "offset": letter.queue_offset,
        "message_id": letter.message_id,
        "origin_topic": properties.get("DLQ_ORIGIN_TOPIC") or properties.get("RETRY_TOPIC", ""),
        "origin_message_id": properties.get("DLQ_ORIGIN_MESSAGE_ID", ""),
        "tries": letter.reconsume_times,
        "stored": utc(letter.store_timestamp_ms),
        "tags": letter.tags,
        "keys": letter.keys,
        "properties": properties,
    }
    body = letter.body_bytes
    try:
        row["body"] = body.decode()
    except UnicodeDecodeError:
        row["body"] = ""
        row["body_base64"] = base64.b64encode(body).decode()
    return row
