"""What `dledger msg` reads and prints."""

from __future__ import annotations

import csv
import io
import json

import pytest

from dledger.cli.message_command import _show_found, time_ms
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.record import encode_record
from dledger.output import CliError, ExitCode, show


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
