"""``dledger dlq``: what consumer groups gave up, and giving it to them again."""

from __future__ import annotations

import base64
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    addresses,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from client.core.message_ext import MessageExt
    from client.core.route import MessageQueue

app = App(name="dlq", help="Look at dead letters and give them back.", backend="trio")

SHOWN_MAX = 100
"""Dead letters that `show` prints unless an option names another number."""

BODY_SHOWN_CHARS = 80


@app.command
async def ls(*, namesrv: Namesrv = DEFAULT_NAMESRV, output: Output = "table") -> int:
    """List the consumer groups that have dead letters."""
    from client.admin.admin import Admin
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        groups = await Admin(client).dead_letter_groups()
    rows = [
        {
            "group": found.group,
            "topic": found.topic,
            "messages": found.messages,
            "resent": found.resent,
        }
        for found in groups
    ]
    show(output, "", rows, ("group", "messages", "resent", "topic"))
    return ExitCode.OK


@app.command(name="show")
async def show_(
    group: str,
    /,
    *,
    offset: Annotated[int, Parameter(help="From this offset on.")] = 0,
    max_: Annotated[int, Parameter(name="--max", help="At most this many.")] = SHOWN_MAX,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Show the dead letters of a consumer group, oldest first."""
    rows = await _letters(group, namesrv, offset, max_)
    if output != "json":
        for row in rows:
            row["body"] = row["body"][:BODY_SHOWN_CHARS]
    columns = ("queue", "offset", "origin_topic", "tries", "stored", "message_id", "body")
    show(output, "", rows, columns)
    return ExitCode.OK


@app.command
async def resend(
    group: str,
    /,
    *,
    offset: Annotated[int | None, Parameter(help="This one only, once more if need be.")] = None,
    max_: Annotated[int | None, Parameter(name="--max", help="At most this many.")] = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> int:
    """Give dead letters back to their group: all that were not given back yet."""
    from client.admin.admin import Admin
    from client.core.errors import NoRouteError
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        try:
            done = await Admin(client).resend_dead_letters(group, offset=offset, limit=max_)
        except NoRouteError as error:
            raise _no_letters(group) from error
    if output == "json":
        print_json({"group": group, "resent": done})
    else:
        note(f"{done} given back to {group}")
    return ExitCode.OK


@app.command
async def export(
    group: str,
    /,
    *,
    to: Annotated[Path | None, Parameter(help="File; standard output otherwise.")] = None,
    offset: Annotated[int, Parameter(help="From this offset on.")] = 0,
    max_: Annotated[int | None, Parameter(name="--max", help="At most this many.")] = None,
    namesrv: Namesrv = DEFAULT_NAMESRV,
) -> int:
    """Write dead letters as JSON, one a line; a body that is no text is in ``body_base64``."""
    rows = await _letters(group, namesrv, offset, max_)
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    if to is None:
        sys.stdout.write(lines.decode())
    else:
        to.write_bytes(lines)
        note(f"{len(rows)} in {to}")
    return ExitCode.OK


async def _letters(
    group: str, namesrv: Namesrv, offset: int, limit: int | None
) -> list[dict[str, Any]]:
    from client.admin.admin import Admin
    from client.core.errors import NoRouteError
    from dledger.cli.sdk import open_client

    async with open_client(addresses(namesrv)) as client:
        try:
            return [
                letter_row(queue, letter)
                async for queue, letter in Admin(client).dead_letters(
                    group, first_offset=offset, limit=limit
                )
            ]
        except NoRouteError as error:
            raise _no_letters(group) from error


def _no_letters(group: str) -> CliError:
    return CliError(f"{group} has no dead letters", next_step="see dledger dlq ls")


def letter_row(queue: MessageQueue, letter: MessageExt) -> dict[str, Any]:
    """Return what is shown of a dead letter."""
    properties = letter.properties
    stored = datetime.fromtimestamp(letter.store_timestamp_ms / 1000, UTC)
    row: dict[str, Any] = {
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "offset": letter.queue_offset,
        "message_id": letter.message_id,
        "origin_topic": properties.get("DLQ_ORIGIN_TOPIC") or properties.get("RETRY_TOPIC", ""),
        "origin_message_id": properties.get("DLQ_ORIGIN_MESSAGE_ID", ""),
        "tries": letter.reconsume_times,
        "stored": stored.isoformat(timespec="milliseconds"),
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
