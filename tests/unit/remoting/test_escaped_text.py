"""Names that others chose reach a terminal as text and never as orders to it."""

from __future__ import annotations

import io

import pytest
import structlog

from dledger.output import note, show
from remoting.escaped_text import escaped
from remoting.log import configure_logs

HOSTILE = "g\x1b[2J\x1b]0;title\x07\r\x9bm\u202e\nx"


@pytest.fixture(autouse=True)
def _logs_as_before() -> object:
    before = structlog.get_config()
    yield None
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


def orders_in(text: str) -> set[str]:
    return {one for one in text if not one.isprintable() and one != "\n"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Ünïcode 中", "plain Ünïcode 中"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb", "a\\nb"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_printable_becomes_an_escape(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_line_ends_stay_where_they_are_wanted() -> None:
    assert escaped("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_log_line_holds_no_escape_sequence_of_a_name() -> None:
    out = io.StringIO()
    configure_logs(form="text", stream=out, group=HOSTILE)
    log = structlog.get_logger()
    log.info("client_silent", client_id=HOSTILE, names=[HOSTILE], **{HOSTILE: 1})
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("handler_failed")
    assert orders_in(out.getvalue()) == set()
    assert "g\\x1b[2J" in out.getvalue()
    assert "Traceback" in out.getvalue()


def test_tables_and_notes_show_names_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show("table", "groups", [{"group": HOSTILE}], ["group"])
    note(f"error: no group {HOSTILE}")
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert orders_in(text) == set()
        assert "\\x1b[2J" in text
