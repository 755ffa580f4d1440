"""`--watch`: the same look again, whatever one of them ends with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from dledger.cli.commands import repeated
from dledger.cli.main import main
from dledger.client.core.errors import BrokerUnreachableError
from dledger.output import CliError, ExitCode


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
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
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
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str], away: Exception
) -> None:
    times, look = looks(0, away, 0)
    assert await repeated(look, 2.0, most=3) == 0
    assert len(times) == 3
    assert capsys.readouterr().err == "error: away\n"


@pytest.mark.parametrize(
    "bug", [KeyError("x"), ExceptionGroup("of a nursery", [CliError("away"), KeyError("x")])]
)
async def test_a_list_ends_with_a_bug(
    autojump_clock: trio.testing.MockClock, bug: Exception
) -> None:
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
