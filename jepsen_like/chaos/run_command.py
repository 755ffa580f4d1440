"""Plays one plan from a terminal; turns what keeps it from its end into *no verdict*."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog
import trio

from commitlog.errors import InvariantBroken, MQError
from dledger.cli.broker_command import parse_options
from dledger.output import CliError, ExitCode, addresses
from jepsen_like.chaos.foreign import run_against
from jepsen_like.chaos.render_result import Progress
from jepsen_like.chaos.run_options import Extras
from jepsen_like.chaos.runner import Options, Ran, run_plan
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.plans.plan import Plan
from jepsen_like.plans.promised import merge_for

_EXPECTED: Final = (MQError, OSError)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@contextmanager
def no_verdict(folder: Path) -> Iterator[None]:
    """Turn what kept a run from its end into *not known*; it is no broken promise."""
    try:
        yield
    except (MQError, OSError, BaseExceptionGroup) as error:
        leaves = list(_leaves(error))
        if any(isinstance(e, InvariantBroken) or not isinstance(e, _EXPECTED) for e in leaves):
            raise
        raise CliError(
            f"the run came to no verdict: {leaves[0]}",
            next_step=f"what there is of it is in {folder}",
            exit_code=ExitCode.USAGE,
        ) from None


def play(plan: Plan, folder: Path, extras: Extras, *, is_live: bool) -> Ran:
    """Play *plan* in *folder*; *is_live*: somebody looks at the terminal.

    Raises:
        MQError: The cluster did not even start; also within a group.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with Progress(plan, is_live=is_live) as tell:
        options = Options(parse_options(extras.set, {}), extras.mutant, extras.links, tell)
        if extras.namesrv:
            return trio.run(run_against, tuple(addresses(extras.namesrv)), plan, folder, options)
        return trio.run(run_plan, plan, folder, options)


def verdict_of(ran: Ran) -> Verdict:
    """Return the verdict of all checkers over a run."""
    return merge_for(ran.plan.workload, ran.verdicts)
