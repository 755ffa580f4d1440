"""What commands show: lists that repeat, ``dledger top``, tables."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from dledger.cli.commands import repeated
from dledger.cli.main import main
from dledger.cli.top_command import Sort, TopLook, page
from dledger.client.core.errors import BrokerUnreachableError
from dledger.output import CliError, ExitCode, print_table

MEMBERS = [
    {
        "group": "broker-a",
        "member": f"n{number}",
        "address": f"127.0.0.1:1091{number}",
        "role": role,
        "term": 7,
        "commit": 4711,
        "lag": lag,
    }
    for number, (role, lag) in enumerate([("leader", 0), ("follower", 12), ("unreachable", None)])
]


def row(topic: str, came: float, went: float, lag: int | None) -> dict[str, Any]:
    group = None if lag is None else "workers"
    return {"topic": topic, "group": group, "in_per_s": came, "out_per_s": went, "lag": lag}


TOPICS = [row("Audit", 1.0, 9.0, 5), row("Orders", 30.5, 2.0, 70), row("Quiet", 0.0, 0.0, None)]
LOOK = TopLook(at="12:00:01", members=MEMBERS, topics=TOPICS)


def shown(look: TopLook, *, sort: Sort = "in", height: int = 0) -> list[str]:
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(page(look, sort=sort, height=height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_top_shows_each_member_and_how_many_serve() -> None:
    lines = shown(LOOK)
    assert lines[0] == "2 of 3 members serve, 12:00:01"
    (follower,) = [line.split() for line in lines if " n1 " in line]
    assert follower == ["broker-a", "n1", "127.0.0.1:10911", "follower", "7", "4711", "12"]
    (lost,) = [line.split() for line in lines if " n2 " in line]
    assert lost[3:] == ["unreachable", "7", "4711", "-"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("in", ["Orders", "Audit", "Quiet"]),
        ("out", ["Audit", "Orders", "Quiet"]),
        ("lag", ["Orders", "Audit", "Quiet"]),
    ],
)
def test_top_orders_topics_by_what_is_asked(sort: Sort, order: list[str]) -> None:
    first = [line.split()[0] for line in shown(LOOK, sort=sort) if line.strip()]
    assert [word for word in first if word in order] == order


@pytest.mark.parametrize("height", [10, 12, 24, 50])
def test_top_fits_the_screen(height: int) -> None:
    many = TopLook(
        at="12:00:01",
        members=MEMBERS * 10,
        topics=[row(f"t{number:03}", float(number), 0.0, number) for number in range(200)],
        topics_left_out=3,
        error="no NameServer answers " * 20,
    )
    lines = shown(many, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    assert "t199" in "".join(lines), "the one with the most is there"
    assert sum(" n0 " in line for line in lines) >= 1


def test_top_keeps_the_rows_when_a_look_fails() -> None:
    lines = shown(TopLook("12:00:03", MEMBERS, TOPICS, error="127.0.0.1:9876 does not answer"))
    assert lines[1] == "the last look failed: 127.0.0.1:9876 does not answer"
    assert any(line.startswith("Orders") for line in lines)


def test_top_shows_numbers_beside_long_names() -> None:
    lines = shown(TopLook("12:00:01", MEMBERS, [row("t" * 127, 12.5, 3.5, 70)]))
    (line,) = [line for line in lines if "ttt" in line]
    assert line.split()[-4:] == ["workers", "12.50", "3.50", "70"]


def test_top_escapes_names() -> None:
    lines = shown(TopLook("12:00:01", MEMBERS, [row("T\x1b[2J", 1.0, 0.0, None)]))
    assert not any("\x1b" in line for line in lines)


def looks(*ends: int | Exception) -> tuple[list[float], Callable[[], Awaitable[int]]]:
    """Return a look that ends so, one time after the other, and the times of its calls."""
    times: list[float] = []

    async def look() -> int:
        times.append(trio.current_time())
        end = ends[len(times) - 1]
        if isinstance(end, Exception):
            raise end
        return end

    return times, look


async def test_without_an_interval_there_is_one_look() -> None:
    times, look = looks(1)
    assert await repeated(look, None) == 1
    assert len(times) == 1


async def test_a_list_repeats_at_the_interval_after_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times, look = looks(0, CliError("away", exit_code=ExitCode.UNREACHABLE), 0)
    assert await repeated(look, 2.0, most=3) == 0
    assert [round(at - times[0]) for at in times] == [0, 2, 4]
    assert capsys.readouterr().err == "error: away\n"


@pytest.mark.parametrize(
    "away",
    [
        BrokerUnreachableError("away"),
        ExceptionGroup("of a nursery", [BrokerUnreachableError("away"), CliError("away, too")]),
    ],
    ids=["one", "group"],
)
async def test_a_list_goes_on_after_an_error_of_the_client(
    capsys: pytest.CaptureFixture[str], away: Exception
) -> None:
    times, look = looks(0, away, 0)
    assert await repeated(look, 2.0, most=3) == 0
    assert len(times) == 3
    assert capsys.readouterr().err == "error: away\n"


@pytest.mark.parametrize(
    "bug", [KeyError("x"), ExceptionGroup("of a nursery", [CliError("away"), KeyError("x")])]
)
async def test_a_list_ends_with_a_bug(bug: Exception) -> None:
    _, look = looks(0, bug, 0)
    with pytest.raises(type(bug)):
        await repeated(look, 2.0, most=3)


async def test_a_first_look_that_fails_ends_the_command() -> None:
    _, look = looks(CliError("away"))
    with pytest.raises(CliError, match="away"):
        await repeated(look, 1.0)


@pytest.mark.parametrize(
    "command", [["topic", "ls"], ["cluster", "ls"], ["raft", "status"], ["group", "ls"]]
)
def test_lists_take_an_interval_above_zero(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--watch", "0"]) == 2
    assert "--watch: above 0" in capsys.readouterr().err
    assert main([*command, "--help"]) == 0
    assert "--watch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "right"),
    [([1, 20], True), ([1.5, None], True), ([None, None], False), ([True, False], False)],
)
def test_print_table_aligns_numbers_and_gaps(
    capsys: pytest.CaptureFixture[str], values: list[object], right: bool
) -> None:
    print_table("", ["number", "name"], [[value, "n0"] for value in values])
    rows = [line for line in capsys.readouterr().out.splitlines() if "n0" in line]
    cells = [line.split("│")[1] for line in rows]
    assert len(cells) == 2
    assert all(cell.startswith("  ") == right for cell in cells)
