"""``dledger schedule``: what is shown of a schedule, and what is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.cli.schedule_command import (
    add,
    instant_text,
    pause,
    schedule_line,
    schedule_row,
    state_text,
)
from dledger.output import CliError
from remoting.protocol.schedule_bodies import ScheduleInfo

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


async def test_a_change_names_a_schedule() -> None:
    with pytest.raises(CliError, match="name a schedule"):
        await pause(namesrv=SILENT)
