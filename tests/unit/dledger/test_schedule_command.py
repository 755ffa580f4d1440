"""``dledger schedule``: what is shown of a schedule, and what is refused at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from dledger.cli import schedule_command
from dledger.cli.schedule_command import add, pause, schedule_line, schedule_row
from dledger.client.admin.admin import Admin
from dledger.client.core.errors import RequestFailedError
from dledger.output import CliError, ExitCode
from dledger.remoting.protocol.schedule_bodies import ScheduleInfo
from dledger.schedule_texts import instant_text, state_text

SILENT = "127.0.0.1:1"


def info(**fields: object) -> ScheduleInfo:
    given = {"name": "s", "topic": "T", "expression": "@daily", "time_zone": "Asia/Tokyo"}
    return ScheduleInfo(**{**given, **fields})  # type: ignore[arg-type]  # by name


def test_instants_are_shown_in_the_zone_of_their_schedule() -> None:
    assert instant_text(1_800_000_000_000, "Asia/Tokyo") == "2027-01-15T17:00:00+09:00"
    assert instant_text(1_800_000_000_500, "Mars/Olympus") == "2027-01-15T08:00:00.500+00:00"
    assert instant_text(0, "UTC") is None


def test_a_schedule_is_active_paused_held_or_ended() -> None:
    assert state_text(info(next_ms=5)) == "active"
    assert state_text(info(next_ms=5, held="topic T may not be written")) == (
        "held: topic T may not be written"
    )
    assert state_text(info(paused=True, held="whatever")) == "paused"
    assert state_text(info()) == "ended"


def test_a_row_has_what_a_table_and_json_show() -> None:
    row = schedule_row("b", info(last_ms=1_800_000_000_000, fired=3, missed=1, queue_id=2))
    assert row == {
        "name": "s",
        "broker": "b",
        "topic": "T",
        "expression": "@daily",
        "time_zone": "Asia/Tokyo",
        "state": "ended",
        "last_due": "2027-01-15T17:00:00+09:00",
        "next_due": None,
        "fired": 3,
        "missed": 1,
        "begin": None,
        "end": None,
        "queue": 2,
        "body_bytes": 0,
    }


def test_a_table_has_two_lines_for_a_schedule() -> None:
    row = schedule_row("b", info(next_ms=1_800_000_000_500, fired=3, missed=1))
    assert schedule_line(row) == {
        "schedule": "s\n@daily",
        "next_due": "2027-01-15T17:00:00\nAsia/Tokyo",
        "fired": 3,
        "missed": 1,
        "state": "active",
    }
    assert schedule_line(schedule_row("b", info()))["next_due"] is None


async def test_a_body_is_given_once() -> None:
    with pytest.raises(CliError, match="give a body or --file"):
        await add("s", "@daily", topic="T", namesrv=SILENT)
    with pytest.raises(CliError, match="give a body or --file"):
        await add("s", "@daily", "b", topic="T", file=Path("body"), namesrv=SILENT)


async def test_a_time_and_a_property_are_read_first() -> None:
    with pytest.raises(CliError, match="--begin tomorrow: expected a time"):
        await add("s", "@daily", "b", topic="T", begin="tomorrow", namesrv=SILENT)
    with pytest.raises(CliError, match="expected name=value"):
        await add("s", "@daily", "b", topic="T", property_=("x",), namesrv=SILENT)


COMMANDS = ("rm", "pause", "resume")


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_change_names_a_schedule(command: str) -> None:
    with pytest.raises(CliError, match="name a schedule"):
        await getattr(schedule_command, command)(namesrv=SILENT)


class Schedules:
    """Has no schedule but "known", in the broker group "b"."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def _do(self, what: str, name: str) -> str:
        if name == "missing":
            raise RequestFailedError("there is none", code=22, remark="")
        self.done.append((what, name))
        return "b"

    async def delete_schedule(self, name: str) -> str:
        return self._do("rm", name)

    async def pause_schedule(self, name: str) -> str:
        return self._do("pause", name)

    async def resume_schedule(self, name: str) -> str:
        return self._do("resume", name)


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> Schedules:
    made = Schedules()

    @asynccontextmanager
    async def admin(_: str) -> AsyncIterator[Admin]:
        yield cast("Admin", made)

    monkeypatch.setattr(schedule_command, "_admin", admin)
    return made


@pytest.mark.parametrize(
    ("command", "outcome"),
    [("rm", "is removed from"), ("pause", "is paused in"), ("resume", "goes on in")],
)
async def test_each_schedule_that_is_named_is_changed(
    schedules: Schedules, capsys: pytest.CaptureFixture[str], command: str, outcome: str
) -> None:
    assert await getattr(schedule_command, command)("x", "y") == ExitCode.OK
    assert schedules.done == [(command, "x"), (command, "y")]
    assert capsys.readouterr().err == f"x {outcome} b\ny {outcome} b\n"


async def test_schedules_before_one_that_fails_are_done(
    schedules: Schedules, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestFailedError, match="there is none"):
        await pause("x", "missing", "y")
    assert schedules.done == [("pause", "x")]
    assert capsys.readouterr().err == "x is paused in b\n"
