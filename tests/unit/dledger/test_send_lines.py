"""``dledger send`` and ``dledger msg``: lines that are sent, messages that are shown."""

import csv
import io
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from dledger.cli.main import main
from dledger.cli.message_command import _show_found, check_delay_level, time_ms
from dledger.cli.send_lines import (
    LINE_BYTES_MAX,
    READ_BYTES,
    Printer,
    counted,
    given,
    lines,
    numbered,
    paced,
    send_all,
)
from dledger.cli.trace_command import path_rows
from dledger.client.core.errors import BrokerRefusedError, MessageIllegalError
from dledger.client.core.message_ext import MessageExt, SendResult, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.client.trace import TraceBean, TraceContext, TraceType
from dledger.commitlog.record import encode_record
from dledger.output import CliError, ExitCode, show

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


class Kept(Printer):
    """A printer that keeps offsets."""

    def __init__(self) -> None:
        super().__init__("table")
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
    printer = Printer("json", streaming=True)
    printer.row(ROW)
    assert json.loads(capsys.readouterr().out + "]") == [ROW]
    printer = Printer("json")
    for count in (0, 1, 2):
        printer = Printer("json")
        for _ in range(count):
            printer.row(ROW)
        printer.end()
        assert json.loads(capsys.readouterr().out) == [ROW] * count


def test_lines_come_at_once_and_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("table", streaming=True)
    printer.row(ROW)
    assert capsys.readouterr().out == "SEND_OK  id  a queue 0 offset 7\n"
    for output in ("table", "json"):
        printer = Printer(output, quiet=True, streaming=True)
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


async def test_paced_bodies_come_at_the_rate_and_do_not_catch_up() -> None:
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


def message(body: bytes, keys: str) -> MessageExt:
    properties = f"KEYS\x01{keys}\x02".encode()
    record = encode_record(topic="T", queue_id=0, body=body, properties=properties)
    return MessageExt(memoryview(record), 0, "broker-a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 7),
        ("0", 0),
        ("1700000000123", 1700000000123),
        ("2026-01-31T12:00:00", 1769860800000),
        ("2026-01-31T13:00:00.250+01:00", 1769860800250),
        ("2026-01-31", 1769817600000),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert time_ms(text, "--from", 7) == expected


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(CliError, match="--until yesterday: expected a time") as raised:
        time_ms("yesterday", "--until", 0)
    assert raised.value.exit_code is ExitCode.USAGE


def test_found_messages_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    found = [message(b'one, "two"', "a b"), message(b"line\nbreak", "c")]
    assert _show_found(found, "csv", "nothing") == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["body"] for row in rows] == ['one, "two"', "line\nbreak"]
    assert [row["keys"] for row in rows] == ["a b", "c"]
    assert json.loads(rows[0]["properties"]) == {"KEYS": "a b"}
    assert rows[0]["broker"] == "broker-a"


def test_found_messages_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert _show_found([message(b"x", "k")], "json", "nothing") == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["body"], row["keys"], row["topic"]) == ("x", "k", "T")


def test_found_messages_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert _show_found([message(b"a body", "k")], "table", "nothing") == ExitCode.OK
    assert "a body" in capsys.readouterr().out


def test_nothing_found_fails_and_is_still_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CliError, match="nothing here"):
        _show_found([], "table", "nothing here")
    assert _show_found([], "json", "nothing here") == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out) == []
    assert _show_found([], "csv", "nothing here") == ExitCode.FAILED
    assert capsys.readouterr().out.startswith("store_time,broker,")


def test_csv_cells(capsys: pytest.CaptureFixture[str]) -> None:
    show("csv", "title", [{"a": 1, "b": None, "c": [1, 2], "d": 1.5, "e": True}], ("a",))
    assert capsys.readouterr().out == 'a,b,c,d,e\n1,,"[1,2]",1.5,True\n'


def test_an_id_is_whole_where_a_body_is_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    row = {"id": "7F0000011DAEA5BC22BC7AE1DBD20000", "place": "broker-a", "body": "word " * 40}
    show("table", "", [row], tuple(row))
    lines = capsys.readouterr().out.splitlines()
    assert row["id"] in lines[3]
    assert max(map(len, lines)) <= 80
    assert sum(line.count("word") for line in lines) == 40
    show("table", "", [{**row, "place": "long-name-" * 5}], tuple(row))
    lines = capsys.readouterr().out.splitlines()
    assert f"id    │ {row['id']}" in lines[1], "a record: a line for each column"
    assert max(map(len, lines)) <= 80


ID = "0A0000010001"
BEAN = TraceBean(ID, "T", keys="k1 k2", store_host="10.0.0.1:10911")
TRACED = [
    TraceContext(TraceType.SUB_AFTER, 2900, (BEAN,), group_name="c", cost_time_ms=900,
                 is_success=False, request_id="R1", context_code=4),
    TraceContext(TraceType.SUB_BEFORE, 2000, (TraceBean(ID, keys="k1 k2"),), group_name="c",
                 request_id="R1"),
    TraceContext(TraceType.SUB_BEFORE, 9000, (TraceBean(ID, retry_times=1),), group_name="c",
                 request_id="R2"),
    TraceContext(TraceType.PUB, 1000, (BEAN,), group_name="p", cost_time_ms=3),
    TraceContext(TraceType.PUB, 1000, (TraceBean("OTHER", "T"),), group_name="p"),
]  # fmt: skip


def test_steps_are_joined_and_stand_in_order_of_time() -> None:
    rows = path_rows(TRACED, ID)
    assert [(r["step"], r["topic"], r["took_ms"], r["try"], r["result"]) for r in rows] == [
        ("send", "T", 3, None, "stored"),
        ("consume", "T", 900, 1, "failed"),
        ("consume", "T", None, 2, "no end is known"),
    ]
    assert rows[0]["time"] == "1970-01-01T00:00:01.000+00:00"
    assert rows[0]["where"] == "10.0.0.1:10911"


def test_a_key_finds_them_too() -> None:
    assert [row["step"] for row in path_rows(TRACED, "k2")] == ["send", "consume"]
    assert path_rows(TRACED, "k3") == []


def test_an_end_without_a_beginning_is_shown() -> None:
    (row,) = path_rows(TRACED[:1], ID)
    assert (row["step"], row["result"], row["time"][17:23]) == ("consume", "failed", "02.900")
