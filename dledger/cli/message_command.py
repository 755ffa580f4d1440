"""``dledger send``, ``dledger consume`` and ``dledger msg``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter, validators

from dledger.cli.commands import open_admin, open_client, with_admin
from dledger.cli.trace_command import trace
from dledger.output import (
    DEFAULT_NAMESRV,
    CliError,
    ExitCode,
    Namesrv,
    Output,
    RowsOutput,
    TopicName,
    addresses,
    no_less_than_0,
    note,
    print_csv,
    print_json,
    print_table,
    show,
    utc,
)
from dledger.remoting.addresses import join_address

if TYPE_CHECKING:
    import trio

    from dledger.client.admin.admin import Admin
    from dledger.client.consumer.pull_consumer import PullConsumer
    from dledger.client.consumer.subscriptions import SubscriptionExpression
    from dledger.client.core.message_ext import MessageExt
    from dledger.client.core.route import MessageQueue
    from dledger.client.producer.results import SendFuture

DEFAULT_LEVELS = 18
MAX_LEVELS = 64
"""Delay levels a broker can be configured with; it has 18 otherwise."""

MAX_DELAY_S = 10.0**9
"""More than brokers take, and few enough to count in milliseconds."""

FOUND_COLUMNS = ("stored_utc", "id_and_place", "keys_and_body")
CSV_COLUMNS = ("store_time", "broker", "queue", "offset", "tags", "keys", "message_id", "body")
"""The head of a CSV without rows."""

PULL_MESSAGES = 500
NUMBER: Final = re.compile("[0-9]{1,18}")
BODY_SHOWN_CHARS = 200

msg = App(name="msg", help="Show messages and their trace.", backend="trio")
msg.command(trace)


async def send(
    *bodies: Annotated[
        str, Parameter(help="Bodies, one a message; none: a line of standard input each.")
    ],
    topic: Annotated[str, Parameter(name=["--topic", "-t"], help="Name of the topic.")],
    tag: Annotated[str, Parameter(help="Tag that consumers filter by.")] = "",
    key: Annotated[str, Parameter(help="Index keys, separated by blanks.")] = "",
    property_: Annotated[
        tuple[str, ...] | None, Parameter(name="--property", help="name=value; may be repeated.")
    ] = None,
    delay_level: Annotated[
        int,
        Parameter(
            help="Delay level, 1 to 18: deliver after 1 s to 2 h.",
            validator=validators.Number(gte=0, lte=MAX_LEVELS),
        ),
    ] = 0,
    delay: Annotated[
        float,
        Parameter(
            help="Deliver after this many seconds.",
            validator=[no_less_than_0, validators.Number(lte=MAX_DELAY_S)],
        ),
    ] = 0.0,
    queue: Annotated[int | None, Parameter(help="Queue id; without it queues take turns.")] = None,
    count: Annotated[
        int, Parameter(help="Copies of each body to send.", validator=validators.Number(gte=1))
    ] = 1,
    file: Annotated[
        Path | None, Parameter(help="Send each line of this file; - is standard input.")
    ] = None,
    rate: Annotated[
        float,
        Parameter(
            help="Messages a second at most; 0: as fast as they are stored.",
            validator=no_less_than_0,
        ),
    ] = 0.0,
    template: Annotated[
        bool, Parameter(help="Replace {number} in each body by the number of the message.")
    ] = False,
    quiet: Annotated[
        bool, Parameter(name=["--quiet", "-q"], help="Do not print where messages are stored.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> None:
    """Send messages and print where they are stored.

    Without a body each line of standard input is one, and is printed when it is stored. A body
    that begins with - comes after --.
    """
    from dledger.cli.config_command import settings_of
    from dledger.cli.progress import progress
    from dledger.cli.send_lines import Printer, counted, given, lines, numbered, paced, send_all
    from dledger.client.admin.admin import Admin
    from dledger.client.core.message import Message
    from dledger.client.producer.producer import Producer

    check_sendable(topic)
    if bodies and file is not None:
        raise CliError("give bodies or --file, not both", exit_code=ExitCode.USAGE)
    is_named = file is not None and str(file) != "-"
    if not bodies and not is_named and sys.stdin.isatty():
        raise CliError(
            "nothing to send",
            next_step="give a body, or lines on standard input",
            exit_code=ExitCode.USAGE,
        )
    properties = _properties(property_ or ())
    source = -1
    if not bodies:
        source = os.open(file, os.O_RDONLY) if is_named and file else sys.stdin.fileno()
    incoming = given(bodies, count) if bodies else lines(partial(os.read, source), count)
    incoming = numbered(incoming) if template else incoming
    incoming = paced(incoming, rate) if rate else incoming
    async with (
        open_client(addresses(namesrv)) as client,
        Producer(client, "dledger-cli") as producer,
    ):
        if delay_level > DEFAULT_LEVELS:
            check_delay_level(delay_level, await settings_of(Admin(client)))
        chosen = None
        if queue is not None:
            queues = {found.queue_id: found for found in await producer.publish_queues(topic)}
            if queue not in queues:
                raise CliError(
                    f"{topic} has no queue {queue}", next_step=f"see dledger topic route {topic}"
                )
            chosen = queues[queue]

        async def send_one(body: bytes) -> SendFuture:
            message = Message(
                topic,
                body,
                tags=tag,
                keys=key,
                properties=properties or None,
                delay_level=delay_level,
                delay_ms=round(delay * 1000),
            )
            return await producer.send_async(message, queue=chosen)

        printer = Printer(output, quiet=quiet, streaming=not bodies)
        with progress(count * len(bodies), "messages") as line:
            # Lines of results are progress themselves.
            incoming = counted(incoming, line.add) if quiet else incoming
            stored = await send_all(incoming, send_one, printer)
    if not bodies:
        note(f"{stored:,} messages are stored")


def check_sendable(topic: str) -> None:
    """Refuse the topics that brokers fill for consumer groups.

    Raises CliError: a usage error; nothing is sent.
    """
    if topic.startswith(("%RETRY%", "%DLQ%")):
        raise CliError(
            f"{topic} is filled by the brokers, for a consumer group",
            next_step="send to the topic itself; dledger dlq resend sends dead letters again",
            exit_code=ExitCode.USAGE,
        )


def check_delay_level(level: int, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse a level that a broker does not have; as RocketMQ's, it would take its longest one.

    Raises CliError: a usage error; nothing is sent.
    """
    for address, found in settings.items():
        levels = len(found.get("messageDelayLevel", "").split()) or DEFAULT_LEVELS
        if level > levels:
            raise CliError(
                f"--delay-level {level}: {address} has the levels 1 to {levels}",
                next_step="--delay SECONDS takes any time",
                exit_code=ExitCode.USAGE,
            )


def _properties(pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise CliError(
                f"--property {pair}: expected name=value, neither of them empty",
                exit_code=ExitCode.USAGE,
            )
        found[name] = value
    return found


async def consume(
    *,
    topic: Annotated[str, Parameter(name=["--topic", "-t"], help="Name of the topic.")],
    from_: Annotated[
        str, Parameter(name="--from", help="earliest, latest, or a queue offset.")
    ] = "earliest",
    queue: Annotated[int | None, Parameter(help="This queue only.")] = None,
    tag: Annotated[str, Parameter(help="Tags, a || b; all otherwise.")] = "*",
    sql: Annotated[
        str, Parameter(help="SQL92 over properties, e.g. \"region = 'EU' AND amount > 5\".")
    ] = "",
    max_: Annotated[int | None, Parameter(name="--max", help="Stop after this many.")] = None,
    group: Annotated[
        str,
        Parameter(
            name=["--group", "-g"],
            help="Consumer group to read as; where accounts are checked it needs permission.",
        ),
    ] = "dledger-cli",
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Wait for more until Ctrl-C.")
    ] = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> None:
    """Print messages of a topic; no offsets are committed. JSON: one object per line."""
    import trio

    from dledger.client.consumer.pull_consumer import PullConsumer
    from dledger.client.consumer.subscriptions import SubscriptionExpression
    from dledger.client.core.errors import NoRouteError

    if sql and tag != "*":
        raise CliError(
            "--tag and --sql exclude each other",
            next_step="write the tag into the expression: TAGS = '…'",
            exit_code=ExitCode.USAGE,
        )
    wanted = SubscriptionExpression.by_sql(sql) if sql else SubscriptionExpression.by_tag(tag)
    if from_ not in ("earliest", "latest") and not NUMBER.fullmatch(from_):
        raise CliError("--from: earliest, latest or an offset", exit_code=ExitCode.USAGE)
    printer = _Printer(output, max_)
    async with open_client(addresses(namesrv)) as client, PullConsumer(client, group) as consumer:
        try:
            all_queues = sorted(await consumer.fetch_message_queues(topic))
        except NoRouteError:
            raise CliError(
                f"no route to topic {topic}", next_step=f"make it: dledger topic create {topic}"
            ) from None
        queues = [found for found in all_queues if queue in (None, found.queue_id)]
        if not queues:
            raise CliError(
                f"{topic} has no such queue", next_step=f"see dledger topic route {topic}"
            )
        async with trio.open_nursery() as nursery:
            printer.scope = nursery.cancel_scope
            for found in queues:
                nursery.start_soon(_read, consumer, found, from_, wanted, follow, printer)


async def _read(
    consumer: PullConsumer,
    queue: MessageQueue,
    start: str,
    wanted: SubscriptionExpression,
    follow: bool,
    printer: _Printer,
) -> None:
    end = await consumer.max_offset(queue)
    if start == "latest":
        offset = end
    else:
        offset = await consumer.min_offset(queue)
        if NUMBER.fullmatch(start):
            offset = max(offset, int(start))
    while follow or offset < end:
        pulled = await consumer.pull(queue, offset, max_messages=PULL_MESSAGES, tags=wanted)
        for message in pulled.messages:
            if not follow and message.queue_offset >= end:
                break
            printer.print(message)
        offset = pulled.next_begin_offset


class _Printer:
    """Prints messages as they come and stops the command at the wanted number."""

    def __init__(self, output: str, limit: int | None) -> None:
        self._output = output
        self._left = limit
        self.scope: trio.CancelScope | None = None

    def print(self, message: MessageExt) -> None:
        import msgspec

        from dledger.remoting.log import escaped

        if self._left is not None:
            if self._left <= 0:
                return
            self._left -= 1
        row = message_row(message)
        if self._output == "json":
            sys.stdout.write(msgspec.json.encode(row, enc_hook=str).decode() + "\n")
        else:
            tags = f"  [{row['tags']}]" if row["tags"] else ""
            line = (
                f"{row['store_time']}  queue {row['queue']} offset {row['offset']}{tags}"
                f"  {row['body'][:BODY_SHOWN_CHARS]}\n"
            )
            sys.stdout.write(escaped(line, keep="\n\t"))
        sys.stdout.flush()
        if self._left == 0 and self.scope is not None:
            self.scope.cancel()


def message_row(message: MessageExt) -> dict[str, Any]:
    """Return what is shown of a message."""
    body = bytes(message.body)
    return {
        "topic": message.topic,
        "broker": message.broker_name,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "phy_offset": message.phy_offset,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "tags": message.tags,
        "keys": message.keys,
        "born_time": utc(message.born_timestamp_ms),
        "store_time": utc(message.store_timestamp_ms),
        "born_host": join_address(*message.born_host),
        "store_host": join_address(*message.store_host),
        "reconsume_times": message.reconsume_times,
        "properties": dict(message.properties),
        "body_bytes": len(body),
        "body": _text(body),
    }


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return "0x" + body.hex()


def show_message(row: Mapping[str, Any], output: str) -> None:
    """Print one message whole."""
    if output == "json":
        print_json(dict(row))
        return
    if output == "csv":
        print_csv(list(row), [row])
        return
    print_table("", ["what", "value"], [[name.replace("_", " "), row[name]] for name in row])


@msg.command(name="by-offset")
@with_admin
async def by_offset(
    admin: Admin,
    topic: TopicName,
    queue: Annotated[int, Parameter(help="Queue id.")],
    offset: Annotated[int, Parameter(help="Offset in the queue.")],
    /,
    *,
    broker: Annotated[str | None, Parameter(help="Broker name, when there are several.")] = None,
    output: RowsOutput = "table",
) -> None:
    """Show the message at an offset of a queue."""
    bounds = {
        found: bounds
        for found, bounds in (await admin.offsets(topic)).items()
        if found.queue_id == queue and broker in (None, found.broker_name)
    }
    if len(bounds) != 1:
        names = ", ".join(found.broker_name for found in bounds)
        raise CliError(
            f"{topic} queue {queue}: "
            + (f"in several brokers, {names}" if bounds else "there is no such queue"),
            next_step="choose with --broker" if bounds else f"see dledger topic route {topic}",
        )
    ((place, (low, high)),) = bounds.items()
    if not low <= offset < high:
        raise CliError(
            f"{topic} queue {queue} holds offsets {low} to {high - 1}, not {offset}"
            if high > low
            else f"{topic} queue {queue} is empty"
        )
    for message in await admin.read_queue(place, offset, 1):
        if message.queue_offset == offset:
            show_message(message_row(message), output)
            return
    raise CliError(f"{topic} queue {queue} gave no message at offset {offset}")


@msg.command(name="by-id")
async def by_id(
    offset_message_id: Annotated[str, Parameter(help="As the answer to the send has it.")],
    /,
    *,
    output: RowsOutput = "table",
) -> None:
    """Show a message by its offset message id, which holds broker address and position."""
    from dledger.client.core.errors import MessageIllegalError

    # The id names the broker; no NameServer is asked.
    async with open_admin(DEFAULT_NAMESRV) as admin:
        try:
            message = await admin.view_message(offset_message_id)
        except MessageIllegalError as error:
            raise CliError(f"{offset_message_id}: {error}", exit_code=ExitCode.USAGE) from None
    show_message(message_row(message), output)


MessageKey = Annotated[str, Parameter(help="One index key as the producer gave it.")]
Since = Annotated[
    str,
    Parameter(
        name="--from", help="Earliest store time: 2026-01-31T12:00:00 (UTC), or ms since 1970."
    ),
]
Until = Annotated[str, Parameter(name="--until", help="Latest store time.")]


@msg.command(name="by-key")
@with_admin
async def by_key(
    admin: Admin,
    topic: TopicName,
    key: MessageKey,
    /,
    *,
    since: Since = "",
    until: Until = "",
    max_: Annotated[
        int, Parameter(name="--max", help="Most messages, newest first; 64 per broker.")
    ] = 32,
    output: RowsOutput = "table",
) -> int:
    """List the messages of a topic that carry an index key, oldest first."""
    from dledger.client.admin.messages import ALWAYS_MS

    begin_ms = time_ms(since, "--from", 0)
    end_ms = time_ms(until, "--until", ALWAYS_MS)
    found = await admin.query_messages(
        topic, key, begin_ms=begin_ms, end_ms=end_ms, max_messages=max_
    )
    return _show_found(found, output, f"{topic} has no message with key {key} in that time")


@msg.command(name="by-unique-key")
@with_admin
async def by_unique_key(
    admin: Admin,
    topic: TopicName,
    message_id: Annotated[str, Parameter(help="As the producer made it.")],
    /,
    *,
    output: RowsOutput = "table",
) -> int:
    """List the messages with an id made by the producer; repeated sends share it."""
    found = await admin.query_unique_key(topic, message_id)
    return _show_found(found, output, f"{topic} has no message with id {message_id}")


@msg.command(name="by-time")
@with_admin
async def by_time(
    admin: Admin,
    topic: TopicName,
    /,
    *,
    since: Since = "",
    until: Until = "",
    queue: Annotated[int | None, Parameter(help="This queue only.")] = None,
    max_: Annotated[int, Parameter(name="--max", help="Most messages, from the oldest on.")] = 32,
    output: RowsOutput = "table",
) -> int:
    """List the messages of a topic stored between two times, oldest first."""
    from dledger.client.admin.messages import ALWAYS_MS

    begin_ms = time_ms(since, "--from", 0)
    end_ms = time_ms(until, "--until", ALWAYS_MS)
    found = await admin.messages_by_time(topic, begin_ms, end_ms + 1, max_, queue_id=queue)
    return _show_found(found, output, f"{topic} has no message of that time")


def time_ms(text: str, option: str, otherwise: int) -> int:
    """Return a time in ms since the epoch: ISO 8601, UTC where it names no zone, or the number."""
    if not text:
        return otherwise
    if NUMBER.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise CliError(
            f"{option} {text}: expected a time like 2026-01-31T12:00:00, or ms since the epoch",
            exit_code=ExitCode.USAGE,
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _show_found(found: Sequence[MessageExt], output: RowsOutput, nothing: str) -> int:
    if not found and output == "table":
        raise CliError(nothing, next_step="see the time range and the topic")
    rows = [message_row(message) for message in found]
    if output == "table":
        rows = [found_line(row) for row in rows]
    show(output, "", rows, CSV_COLUMNS if output == "csv" else FOUND_COLUMNS)
    return ExitCode.OK if found else ExitCode.FAILED


def found_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of one of several messages, in three columns. Pure."""
    labels = " ".join(filter(None, (row["tags"] and f"[{row['tags']}]", row["keys"])))
    body = row["body"]
    if len(body) > BODY_SHOWN_CHARS:
        body = body[:BODY_SHOWN_CHARS] + "…"
    return {
        "stored_utc": row["store_time"][:23].replace("T", "\n"),
        "id_and_place": (
            f"{row['message_id']}\n{row['broker']} queue {row['queue']} offset {row['offset']}"
        ),
        "keys_and_body": "\n".join(filter(None, (labels, body))),
    }
