"""Plays one plan from a terminal, against brokers of its own or a cluster that is there already.

Nothing is broken in a cluster that is there already. What its replicas hold cannot be read from
here, so every queue is read over the wire when the load is over, and that stands for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog
import trio

from client.core.errors import ClientError
from commitlog.errors import InvariantBroken, MQError
from dledger.cli.broker_command import parse_options
from dledger.output import CliError, ExitCode, addresses
from dledger.settings_values import parse_delay_levels
from jepsen_like.chaos.machines import RealClient
from jepsen_like.chaos.recorder import Recorder, write_rest, write_tables
from jepsen_like.chaos.render_result import Progress
from jepsen_like.chaos.run_options import Extras
from jepsen_like.chaos.runner import (
    LIVENESS,
    READERS,
    RPC_TIMEOUT_S,
    Options,
    Ran,
    run_plan,
    versions,
)
from jepsen_like.checkers.all_checks import check_everything
from jepsen_like.checkers.verdict import Verdict, Violation
from jepsen_like.history.operation import History, ReplicaRead, RunHeader
from jepsen_like.plans.plan import Plan, encode_plan
from jepsen_like.plans.promised import merge_for, promised
from jepsen_like.workloads.clients import WorkloadClients

_EXPECTED: Final = (MQError, OSError)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@contextmanager
def no_verdict(folder: Path) -> Iterator[None]:
    """Turn what kept a run from its end into *not known*; it is no violation."""
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
    """Play *plan* in *folder*; *is_live*: a person watches the terminal.

    Raises:
        MQError: The cluster did not even start; also within a group.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with Progress(plan, is_live=is_live) as tell:
        options = Options(parse_options(extras.set, {}), extras.tree, extras.links, tell)
        if extras.namesrv:
            return trio.run(run_against, tuple(addresses(extras.namesrv)), plan, folder, options)
        return trio.run(run_plan, plan, folder, options)


def verdict_of(ran: Ran) -> Verdict:
    """Return the verdict of all checkers over a run."""
    return merge_for(ran.plan.workload, ran.verdicts)


READY_WITHIN_S: Final = 30.0
"""A cluster that runs makes a topic within this."""

DRAIN_WITHIN_S: Final = 120.0
NODE: Final = "drain"
"""Stands for the replicas in the history."""


class RealTime:
    """A `jepsen_like.workloads.recorder.Stage` that began when it was made."""

    def __init__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the begin."""
        return (time.monotonic_ns() - self._begin_ns) / 1e9

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await trio.sleep(seconds)


async def run_against(
    name_servers: tuple[str, ...], plan: Plan, folder: Path, options: Options
) -> Ran:
    """Load a running cluster for the duration of *plan*, read all queues, and judge.

    A topic of its own is made and stays there.
    """
    header = RunHeader(folder.name, plan.seed, encode_plan(plan), versions())
    ran = Ran(plan, folder, history=History(header))
    recorder, stage = Recorder(folder / "history", header), RealTime()
    clients = WorkloadClients(
        stage, plan, ran.history, broker="", topic=f"chaos-{plan.seed}", record=recorder.note
    )
    found: list[Verdict] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recorder.run)

            def machine(name: str) -> RealClient:
                program = clients.run_readers if name == READERS else clients.run
                return RealClient(name, name_servers, program, nursery, rpc_timeout_s=RPC_TIMEOUT_S)

            writing, reading = machine("clients"), machine(READERS)
            await writing.start()
            with trio.move_on_after(READY_WITHIN_S) as waiting:
                await clients.ready.wait()
            if waiting.cancelled_caught:
                raise CliError(
                    f"no topic could be made through {';'.join(name_servers)} within "
                    f"{READY_WITHIN_S:.0f} s",
                    next_step="see dledger cluster ls",
                )
            await reading.start()
            end_s = stage.elapsed_s + plan.duration_ms / 1000
            while stage.elapsed_s < end_s:
                options.on_progress("load", clients.counts, ran.faults)
                await trio.sleep(0.5)
            await clients.finish()
            if plan.workload.delayed_per_mille:
                await trio.sleep(max(parse_delay_levels(plan.settings.delay_levels)) / 1000 + 2.0)
            ran.settled = await _drain(clients, writing)
            nursery.cancel_scope.cancel()
    finally:
        recorder.close()
    ran.duration_s = stage.elapsed_s
    if not ran.settled:
        text = f"the queues could not be read within {DRAIN_WITHIN_S} s"
        found.append(Verdict(LIVENESS, "invalid", (Violation(LIVENESS, "cluster", text),)))
    for queue, (begin, values) in clients.drained.items() if ran.settled else ():
        ran.history.replica_reads.append(
            ReplicaRead(clients.now_ns, NODE, queue.topic, queue.queue_id, begin, values)
        )
    ran.verdicts = [
        *found,
        *check_everything(ran.history, settled=ran.settled, **promised(plan, is_foreign=True)),
    ]
    write_rest(folder, ran.history)
    write_tables(folder)
    return ran


async def _drain(clients: WorkloadClients, machine: RealClient) -> bool:
    with trio.move_on_after(DRAIN_WITHIN_S):
        while True:
            try:
                assert machine.instance is not None
                await clients.drain(machine.instance)
            except ClientError:
                await trio.sleep(1.0)
            else:
                return True
    return False
