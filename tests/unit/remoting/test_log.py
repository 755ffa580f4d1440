"""The SDK's log lines: where they go, and what they never hold."""

import io
import logging
import subprocess
import sys

import pytest
import structlog

from dledger.output import note, show
from dledger.remoting.log import configure_logs, escaped, get_logger

FAIL = """
import sys
{before}
from dledger.remoting.log import get_logger
log = get_logger("dledger.client.x")
def listener(secret):
    raise ValueError("no")
log.debug("queues_given", queues=3)
log.warning("no route yet", topic="T\\n")
try:
    listener("card-number")
except ValueError:
    log.exception("listener_failed", group="g")
print("a result")
"""
STDLIB = "import logging; logging.basicConfig(level='DEBUG', stream=sys.stderr)"
STRUCTLOG = (
    "import structlog;"
    " structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr),"
    " processors=[structlog.processors.JSONRenderer()])"
)


def said(before: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FAIL.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a result\n", "standard output is the program's"
    return done.stderr


def test_log_without_setup_warns_on_standard_error() -> None:
    err = said("")
    assert "queues_given" not in err
    assert "no route yet topic='T\\n'" in err
    assert "listener_failed group='g'" in err
    assert "ValueError: no" in err
    assert "card-number" not in err


COMMAND = """
import sys
from dledger.cli.commands import open_client
from dledger.remoting.log import get_logger
open_client(["127.0.0.1:1"])
log = get_logger("dledger.client.x")
assert "structlog" not in sys.modules
log.info("route_known", topic="T")
log.warning("no route yet", topic="T")
print("a result")
"""


def test_log_of_a_command_is_set_up_by_its_first_line() -> None:
    ran = [sys.executable, "-c", COMMAND]
    done = subprocess.run(ran, capture_output=True, text=True, check=True)
    assert done.stdout == "a result\n"
    (line,) = done.stderr.splitlines()
    assert "warning" in line
    assert "no route yet" in line
    assert "topic=T" in line


def test_logging_of_the_standard_library_decides() -> None:
    lines = said(STDLIB).splitlines()
    assert lines[0] == "DEBUG:dledger.client.x:queues_given queues=3"
    assert lines[1].startswith("WARNING:dledger.client.x:no route yet")


def test_a_program_that_configured_structlog_gets_its_own_form() -> None:
    assert '"topic": "T\\n"' in said(STRUCTLOG).replace("\\\\n", "\\n")


def test_a_line_is_filtered_before_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    class Costly:
        def __repr__(self) -> str:
            raise AssertionError("was formatted")

    structlog.reset_defaults()
    log = get_logger("dledger.client.y")
    with caplog.at_level(logging.WARNING, logger="dledger"):
        log.info("nothing", what=Costly())
        log.bind(peer="n1").warning("something 100%", n=1)
    assert [record.getMessage() for record in caplog.records] == ["something 100% peer='n1' n=1"]
    assert caplog.records[0].name == "dledger.client.y"


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
