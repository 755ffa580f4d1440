"""Lists that repeat: the same look again and again until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Final

from cyclopts import Parameter

from dledger.commitlog.errors import InvariantBroken, MQError
from dledger.output import CliError, ExitCode

Watch = Annotated[
    float | None,
    Parameter(name="--watch", help="Repeat, with this many seconds between, until Ctrl-C."),
]

CLEAR: Final = "\x1b[H\x1b[2J"


async def repeated(
    look: Callable[[], Awaitable[int]], every_s: float | None, most: int | None = None
) -> int:
    """Look once, or again every *every_s* seconds; return the status of the last look.

    Args:
        most: Calls of *look* at most; None: until cancelled.
    Raises:
        CliError: What *look* raises the first time, and an interval that is none; later failures
            of it are shown, since a cluster that is watched may be away for a moment.
    """
    import trio

    from dledger.output import note

    if every_s is not None and not every_s > 0:
        raise CliError("--watch: above 0", exit_code=ExitCode.USAGE)
    status, done = await look(), 1
    while every_s is not None and (most is None or done < most):
        await trio.sleep(every_s)
        if sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        try:
            status = await look()
        except (MQError, ExceptionGroup) as error:
            first = known_error(error)
            note(f"error: {first}")
            status = first.exit_code if isinstance(first, CliError) else ExitCode.FAILED
        done += 1
    return status


def known_error(error: Exception) -> MQError:
    """Return what a look failed with.

    Raises:
        Exception: *error*, where part of it is a bug.
    """
    if isinstance(error, MQError):
        found = [error]
    elif isinstance(error, ExceptionGroup):
        known, others = error.split(MQError)
        if known is None or others is not None:
            raise error
        found = list(_leaves(known))
    else:
        raise error
    if any(isinstance(each, InvariantBroken) for each in found):
        raise error
    return found[0]


def _leaves(group: ExceptionGroup[MQError]) -> Iterator[MQError]:
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup):
            yield from _leaves(each)
        else:
            yield each
