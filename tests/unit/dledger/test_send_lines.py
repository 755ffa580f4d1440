"""`dledger send` of many messages: a window under way, results in order, failures."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from dledger.cli.main import main
from dledger.cli.message_command import check_delay_level
from dledger.cli.send_lines import (
    LINE_BYTES_MAX,
    READ_BYTES,
    counted,
    given,
    lines,
    numbered,
    paced,
    printer_of,
    send_all,
)
from dledger.client.core.errors import BrokerRefusedError, MessageIllegalError
from dledger.client.core.message_ext import SendResult, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.output import CliError

QUEUE = MessageQueue("T", "broker-a", 0)


class Send:
    """A send under way; the test decides when and how it ends."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.error: BrokerRefusedError | None = None
        self.ended = trio.Event()

    def end(self, error: BrokerRefusedError | None = None) -> None:
        self.error = error
        self.ended.set()

    async def result(self) -> SendResult:
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        return SendResult(SendStatus.SEND_OK, f"id-{self.number}", QUEUE, self.number)


class Sends:
    """What `send_all` has sent so far."""

    def __init__(self) -> None:
        self.made: list[Send] = []
        self.bodies: list[bytes] = []

    async def send(self, body: bytes) -> Send:
        self.bodies.append(body)
        self.made.append(Send(len(self.made)))
        return self.made[-1]


class Kept:
    """A printer that keeps offsets."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.ended = False

    def row(self, row: dict[str, Any]) -> None:
        self.offsets.append(row["offset"])

    def end(self) -> None:
        self.ended = True


async def bodies(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%d" % number


async def test_many_are_under_way_and_printed_in_order_as_they_come() -> None:
    sends, kept = Sends(), Kept()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: send_all(bodies(10), sends.send, kept, window_messages=4))
        await trio.testing.wait_all_tasks_blocked()
        assert len(sends.made) == 4, "as many as the window has"
        sends.made[1].end()
        await trio.testing.wait_all_tasks_blocked()
        assert kept.offsets == []
        sends.made[0].end()
        await trio.testing.wait_all_tasks_blocked()
        assert kept.offsets == [0, 1]
        assert len(sends.made) == 6
        for _ in range(10):
            for send in sends.made:
                send.end()
            await trio.testing.wait_all_tasks_blocked()
    assert kept.offsets == list(range(10))
    assert sends.bodies == [b"%d" % number for number in range(10)]
    assert kept.ended


async def test_a_failure_ends_the_input_and_what_is_stored_is_printed() -> None:
    sends, kept = Sends(), Kept()
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(BrokerRefusedError, match="full") as caught:
                await send_all(bodies(100), sends.send, kept, window_messages=4)
            assert caught.value.__notes__ == ["3 stored before and beside it, each of them printed"]

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        sends.made[0].end()
        sends.made[1].end(BrokerRefusedError("the disk is full", code=14))
        sends.made[2].end()
        sends.made[3].end()
        await trio.testing.wait_all_tasks_blocked()
        for send in sends.made[4:]:
            send.end(BrokerRefusedError("the disk is full", code=14))
    assert kept.offsets == [0, 2, 3]
    assert len(sends.made) <= 6
    assert kept.ended


async def test_refused_line_does_not_hide_the_others() -> None:
    kept = Kept()

    async def send(body: bytes) -> Send:
        if body == b"2":
            raise BrokerRefusedError("no", code=1)
        made = Send(int(body))
        made.end()
        return made

    with pytest.raises(BrokerRefusedError):
        await send_all(bodies(5), send, kept)
    assert kept.offsets == [0, 1]


@pytest.mark.parametrize(
    ("pieces", "found"),
    [([b"a\nb\n"], [b"a", b"b"]), ([b"a", b"b\r\n\n", b"\n", b"c"], [b"ab", b"c"]), ([], [])],
)
async def test_lines_of_standard_input(pieces: list[bytes], found: list[bytes]) -> None:
    left = [*pieces, b""]
    assert [line async for line in lines(lambda _: left.pop(0), 1)] == found
    assert [line async for line in given(["x"], 2)] == [b"x", b"x"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["line feed", "both", "none"])
async def test_line_of_the_largest_message_is_sent(end: bytes) -> None:
    longest = b"x" * (LINE_BYTES_MAX - len(end[:-1]))
    left = [b"a\n", longest[:100], longest[100:], end, b""]
    found = [line async for line in lines(lambda _: left.pop(0), 1)]
    assert [len(line) for line in found] == [1, len(longest)]


@pytest.mark.parametrize("end", [b"", b"\n", b"x" * READ_BYTES], ids=["none", "one", "unread"])
async def test_line_longer_than_a_message_is_refused(end: bytes) -> None:
    left = [b"a\n\nb\n", b"x" * LINE_BYTES_MAX, b"x" + end, b"never read"]
    found: list[bytes] = []

    async def take() -> None:
        async for line in lines(lambda _: left.pop(0), 1):
            found.append(line)

    with pytest.raises(MessageIllegalError, match=f"line 4 has more than {LINE_BYTES_MAX} bytes"):
        await take()
    assert found == [b"a", b"b"]
    assert left == [b"never read"]


ROW = {"status": "SEND_OK", "message_id": "id", "broker": "a", "queue": 0, "offset": 7}


def test_json_is_an_array_that_grows(capsys: pytest.CaptureFixture[str]) -> None:
    printer = printer_of("json", quiet=False, streaming=True)
    printer.row(ROW)
    assert json.loads(capsys.readouterr().out + "]") == [ROW]
    printer = printer_of("json", quiet=False, streaming=False)
    for count in (0, 1, 2):
        printer = printer_of("json", quiet=False, streaming=False)
        for _ in range(count):
            printer.row(ROW)
        printer.end()
        assert json.loads(capsys.readouterr().out) == [ROW] * count


def test_lines_come_at_once_and_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    printer = printer_of("table", quiet=False, streaming=True)
    printer.row(ROW)
    assert capsys.readouterr().out == "SEND_OK  id  a queue 0 offset 7\n"
    for output in ("table", "json"):
        printer = printer_of(output, quiet=True, streaming=True)
        printer.row(ROW)
        printer.end()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["-t", "%DLQ%x", "hi"], "%DLQ%x is filled by the brokers"),
        (["-t", "%RETRY%x", "hi"], "%RETRY%x is filled by the brokers"),
        (["-t", "x", "hi", "--delay-level", "99"], "--delay-level"),
        (["-t", "x", "hi", "--delay-level", "-1"], "--delay-level"),
        (["-t", "x", "hi", "--delay", "-1"], "--delay"),
        (["-t", "x", "hi", "--delay", "nan"], "--delay"),
        (["-t", "x", "hi", "--delay", "inf"], "--delay"),
        (["-t", "x", "hi", "--delay", "1e307"], "--delay"),
        (["-t", "x", "hi", "--rate", "nan"], "--rate"),
        (["-t", "x", "hi", "--rate", "-1"], "--rate"),
        (["-t", "x", "hi", "--count", "0"], "--count"),
    ],
)
def test_what_no_send_can_mean_is_refused(
    tokens: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["send", *tokens]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_delay_level_above_those_of_a_broker_is_refused() -> None:
    settings = {"h:1": {"messageDelayLevel": "1s 2s 3s " * 7}, "h:2": {}}
    check_delay_level(18, settings)
    with pytest.raises(CliError, match="--delay-level 19: h:2 has the levels 1 to 18; --delay"):
        check_delay_level(19, settings)
    with pytest.raises(CliError, match="h:1 has the levels 1 to 21"):
        check_delay_level(22, settings)


async def test_bodies_that_are_no_text_keep_their_bytes() -> None:
    argument = os.fsdecode(b"caf\xe9")
    assert [body async for body in given([argument, "café"], 1)] == [b"caf\xe9", "café".encode()]


async def test_bodies_of_a_template_are_numbered() -> None:
    bodies = numbered(given(["order {number}", "plain"], 2))
    assert [body async for body in bodies] == [b"order 1", b"order 2", b"plain", b"plain"]


async def test_paced_bodies_come_at_the_rate_and_do_not_catch_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    times, began = [], trio.current_time()
    async for body in paced(given(["a", "b", "c", "d"], 1), 10.0):
        times.append(round(trio.current_time() - began, 3))
        if body == b"b":
            await trio.sleep(5)
    assert times == [0.0, 0.1, 5.1, 5.2]


async def test_counted_bodies_are_counted_once_each() -> None:
    seen: list[None] = []
    assert [body async for body in counted(given(["a", "b"], 2), lambda: seen.append(None))]
    assert len(seen) == 4
