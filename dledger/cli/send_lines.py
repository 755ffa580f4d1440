"""Many sends of one command: a bounded window under way, results in the order of the input."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import trio

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import MAX_BODY_BYTES
from dledger.client.core.message_ext import SendResult
from dledger.commitlog.errors import MQError
from dledger.output import print_table

WINDOW_MESSAGES: Final = 256
"""Under way at once: the SDK makes a few requests of them, and no more wait for a lost answer."""

READ_BYTES: Final = 64 * 1024
"""Taken from standard input at once."""

LINE_BYTES_MAX: Final = MAX_BODY_BYTES
"""Of one line, a carriage return at its end included: a longer one is no message, and a file
without line ends would be gathered in memory."""


class Future(Protocol):
    """A send under way, as `dledger.client.producer.producer.Producer.send_async` returns it."""

    async def result(self) -> SendResult:
        """Wait for the end of the send."""
        ...


COLUMNS: Final = ("status", "message_id", "broker", "queue", "offset")


class Printer:
    """Prints results one after the other: a JSON array, or lines, each as soon as it is there.

    The few messages that stand on a command line, not *streaming*, are a table at the end.
    """

    def __init__(self, output: str, *, quiet: bool = False, streaming: bool = False) -> None:
        self._is_json = output == "json"
        self._is_quiet = quiet
        self._is_streaming = streaming
        self._rows: list[dict[str, Any]] = []
        self._before = "[\n"

    def row(self, row: dict[str, Any]) -> None:
        """Take one result."""
        if self._is_quiet:
            return
        if self._is_json:
            sys.stdout.write(f"{self._before}  {msgspec.json.encode(row).decode()}")
            self._before = ",\n"
        elif self._is_streaming:
            sys.stdout.write(
                f"{row['status']}  {row['message_id']}  {row['broker']} queue {row['queue']}"
                f" offset {row['offset']}\n"
            )
        else:
            self._rows.append(row)
        sys.stdout.flush()

    def end(self) -> None:
        """Print what is left, also after a failure."""
        if self._is_json and not self._is_quiet:
            sys.stdout.write("[]\n" if self._before == "[\n" else "\n]\n")
        elif self._rows:
            titles = [name.replace("_", " ") for name in COLUMNS]
            print_table("", titles, [[row[name] for name in COLUMNS] for row in self._rows])
        sys.stdout.flush()


async def send_all(
    bodies: AsyncIterator[bytes],
    send: Callable[[bytes], Awaitable[Future]],
    printer: Printer,
    *,
    window_messages: int = WINDOW_MESSAGES,
) -> int:
    """Send *bodies* and print each result in order; return how many are stored.

    The first failure ends the input; what is under way by then is waited for and printed.

    Raises MQError: the first failure; the note on it has the number of stored ones.
    """
    failures: list[MQError] = []
    stored = 0
    # One is with the printing task, one with the sending one.
    outbox, inbox = trio.open_memory_channel[Future](max(window_messages - 2, 0))

    async def fill(scope: trio.CancelScope) -> None:
        with scope:
            async with outbox:
                try:
                    async for body in bodies:
                        await outbox.send(await send(body))
                except MQError as error:
                    failures.append(error)

    try:
        async with trio.open_nursery() as nursery:
            reading = trio.CancelScope()
            nursery.start_soon(fill, reading)
            async for future in inbox:
                try:
                    result = await future.result()
                except MQError as error:
                    failures.append(error)
                    reading.cancel()
                else:
                    stored += 1
                    printer.row(result_row(result))
    finally:
        printer.end()
    if failures:
        failures[0].add_note(f"{stored} stored before and beside it, each of them printed")
        raise failures[0]
    return stored


def result_row(result: SendResult) -> dict[str, Any]:
    """Return what is shown of a stored message."""
    return {
        "status": result.status.name,
        "message_id": result.message_id,
        "offset_message_id": result.offset_message_id,
        "broker": result.message_queue.broker_name,
        "queue": result.message_queue.queue_id,
        "offset": result.queue_offset,
        "recall_handle": result.recall_handle,
    }


async def given(bodies: Sequence[str], count: int) -> AsyncIterator[bytes]:
    """Yield the bodies of a command line, each *count* times."""
    for body in bodies:
        for _ in range(count):
            # Bytes of the command line that are no UTF-8 come as Python hides them in text.
            yield body.encode(errors="surrogateescape")


async def lines(read: Callable[[int], bytes], count: int) -> AsyncIterator[bytes]:
    """Yield the lines that *read*, which may block, brings; empty ones left out.

    Args:
        read: Called in a thread with the most bytes to return; empty at the end.
    Raises:
        MessageIllegalError: A line is longer than a message may be; those before it were yielded.
    """
    number, rest = 1, b""
    while data := await trio.to_thread.run_sync(read, READ_BYTES, abandon_on_cancel=True):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if text := _checked(line, number):
                for _ in range(count):
                    yield text
            number += 1
        _checked(rest, number)
    if text := _checked(rest, number):
        for _ in range(count):
            yield text


def _checked(line: bytes, number: int) -> bytes:
    """Return a line, or its beginning, without the carriage returns at its end."""
    if len(line) > LINE_BYTES_MAX:
        raise MessageIllegalError(
            f"line {number} has more than {LINE_BYTES_MAX} bytes, the most of a message;"
            " neither it nor what follows was sent"
        )
    return line.rstrip(b"\r")


async def numbered(bodies: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Replace ``{number}`` in each body by its number, from 1 on."""
    number = 0
    async for body in bodies:
        number += 1
        yield body.replace(b"{number}", b"%d" % number)


async def paced(bodies: AsyncIterator[bytes], per_s: float) -> AsyncIterator[bytes]:
    """Yield the bodies no faster than *per_s*; after a stop it does not catch up."""
    next_s = trio.current_time()
    async for body in bodies:
        await trio.sleep_until(next_s)
        yield body
        next_s = max(next_s, trio.current_time() - 1 / per_s) + 1 / per_s


async def counted(bodies: AsyncIterator[bytes], add: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield the bodies, calling *add* for each of them."""
    async for body in bodies:
        yield body
        add()
