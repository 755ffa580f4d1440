"""Plays one plan from a terminal, against brokers of its own or a cluster that is there already.

Nothing is broken in a cluster that is there already: every queue is read over the wire when the
load is over, in place of its replicas.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import trio

from dledger.cli.broker_command import parse_options
from dledger.commitlog.errors import InvariantBroken, MQError
from dledger.jepsen_like.chaos.machines import RealClient
from dledger.jepsen_like.chaos.plan_draw import Candidates, step_text
from dledger.jepsen_like.chaos.recorder import Recorder, encode_json, write_rest, write_tables
from dledger.jepsen_like.chaos.run_result import result_of, too_little
from dledger.jepsen_like.chaos.runner import (
    LIVENESS,
    READERS,
    RPC_TIMEOUT_S,
    LinksBy,
    Options,
    Ran,
    run_plan,
    versions,
)
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import History, ReplicaRead, RunHeader
from dledger.jepsen_like.plans.plan import Plan, encode_plan
from dledger.jepsen_like.plans.promised import merge_for, promised
from dledger.jepsen_like.report.run_folder import RESULT_FILE, read_result
from dledger.jepsen_like.report.wording import many
from dledger.jepsen_like.workloads.clients import WorkloadClients
from dledger.output import CliError, ExitCode, addresses, leaves_of, live_text, note, print_table
from dledger.settings.text import parse_delay_levels

# ---------------------------------------------------------------------------------- options


class Extras(msgspec.Struct, frozen=True):
    """How a run differs from its plan; without it, it cannot be repeated.

    Attributes:
        set: Broker settings over those of the plan, each ``table.name=value``.
        broker_tree: Source tree that the brokers run; empty: the one of the runner.
        namesrv: NameServers of a foreign cluster; empty: the runner's own.
        links: What breaks links.
    """

    set: tuple[str, ...] = ()
    broker_tree: str = ""
    namesrv: str = ""
    links: LinksBy = "proxy"

    @property
    def tree(self) -> Path | None:
        """The source tree that the brokers run; None: the one of the runner."""
        return Path(self.broker_tree) if self.broker_tree else None

    def command(self, plan: Path) -> str:
        """Return the command that plays *plan* the same way."""
        words = ["dledger-chaos", "run", "--plan", str(plan)]
        for assignment in self.set:
            words += ["--set", assignment]
        if self.broker_tree:
            words += ["--broker-tree", self.broker_tree]
        if self.namesrv:
            words += ["--namesrv", self.namesrv]
        if self.links != "proxy":
            words += ["--links", self.links]
        return shlex.join(words)


def repeats(extras: Extras, folder: Path) -> dict[str, Any]:
    """Return what `result.json` has for playing the plan in *folder* again."""
    command = extras.command(folder / "plan.json")
    return {"command": command, "extras": msgspec.to_builtins(extras)}


def folder_of(name: str, store: Path) -> Path:
    """Return the folder of a run, by its path or by its name in *store*.

    Raises CliError: there is none; a usage error.
    """
    for folder in (Path(name), store / name):
        if (folder / "plan.json").is_file():
            return folder
    raise CliError(
        f"{name} is no run, here or in {store}",
        next_step="name one, or its --store; dledger-chaos serve lists them",
        exit_code=ExitCode.USAGE,
    )


def extras_of(folder: Path) -> Extras:
    """Return the options of a run that are no part of its plan; the defaults if it did not end."""
    return msgspec.convert(read_result(folder).get("extras", {}), type=Extras)


def faults_of(folder: Path) -> dict[str, int]:
    """Return how often each fault was done, as the run counted; nothing if it did not end."""
    return dict(read_result(folder).get("faults", {}))


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write `result.json` and the report of a run; return the page, also put into *result*."""
    from dledger.jepsen_like.report.run_report import report

    path = folder / RESULT_FILE
    path.write_bytes(encode_json(result))
    page = report(folder)
    result["report"] = str(page)
    path.write_bytes(encode_json(result))
    return page


# ------------------------------------------------------------------------------ what a person reads


VIOLATIONS_SHOWN: Final = 10
"""The report has all; one bug shows in hundreds."""


def show_result(result: dict[str, Any]) -> None:
    """Print what came of a run as tables."""
    names = (
        "verdict",
        "reason",
        "acknowledged",
        "acknowledged_sends",
        "lost",
        "duplicated",
        "faults_done",
        "fault_kinds",
        "aimed_at_leader",
        "failovers",
        "failover_p50_ms",
        "failover_p99_ms",
        "failover_max_ms",
        "report",
    )
    rows = [[name.replace("_", " "), result.get(name)] for name in names]
    print_table("Run", ["what", "value"], [[a, _text(b)] for a, b in rows if b not in ("", None)])
    found = [violation for verdict in result["verdicts"] for violation in verdict["violations"]]
    if found:
        print_table(
            "Violations",
            ["checker", "name", "where", "what", "operations"],
            [
                [v["checker"], v["name"], v["subject"], v["detail"], str(list(v["operations"]))]
                for v in found[:VIOLATIONS_SHOWN]
            ],
        )
    reasons = too_little(result)
    if reasons:
        note(
            f"warning: too little happened for the verdict to prove much: {', '.join(reasons)};"
            " give more --time, or another --seed"
        )
    if result["skipped"]:
        print_table(
            "Skipped",
            ["fault", "times", "why"],
            [[row["kind"], row["count"], row["reason"]] for row in result["skipped"]],
        )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_smallest(
    plan: Plan, candidates: Candidates, extras: Extras, page: Path | None
) -> ExitCode:
    """Write the smallest plan that was found, say what to do with it, or that there is none."""
    small = candidates.smallest
    if small is None:
        note(
            f"no smaller plan broke it again in {many(candidates.tried, 'run')}. What real time "
            "does differs from run to run: give more --plays, or play the whole plan again:"
        )
        note(extras.command(candidates.folder / "plan.json"))
        return ExitCode.FAILED
    path = candidates.folder / "minimized.json"
    path.write_text(encode_plan(small))
    print_table(
        "Smallest plan",
        ["at", "fault", "target", "lasts"],
        [step_text(step) for step in small.steps],
    )
    note(
        f"{many(len(plan.steps), 'fault')} in {plan.duration_ms / 1000:.0f} s became "
        f"{len(small.steps)} in {small.duration_ms / 1000:.0f} s, "
        f"in {many(candidates.tried, 'run')}"
    )
    note(f"see what it broke: {page}")
    note(f"play it again: {extras.command(path)}")
    note(f"look for it in simulated time: dledger sim run --plan {path}")
    return ExitCode.OK


Tell = Callable[[str, Counter[str], Counter[str]], None]


def progress_line(phase: str, elapsed_s: float, counts: Counter[str], done: Counter[str]) -> str:
    """
    Return what a person sees of a run that goes on; *counts* are by name and outcome: ``send_ok``.
    """
    ended = {
        word: sum(n for name, n in counts.items() if name.endswith(word))
        for word in ("ok", "info", "fail")
    }
    faults = sum(n for kind, n in done.items() if kind != "skipped")
    return (
        f"{elapsed_s:.0f} s, {phase}: {ended['ok']:,} ok, {ended['info']:,} unknown, "
        f"{ended['fail']:,} failed, {faults} faults, {done['skipped']} skipped"
    )


@contextmanager
def progress(plan: Plan, *, is_live: bool) -> Iterator[Tell]:
    """Print what will be done, then show one line that changes, on standard error.

    *is_live*: a person watches; else only the first line is written.
    """
    note(
        f"{many(len(plan.steps), 'fault')} in {plan.duration_ms / 1000:.0f} s against "
        f"{many(plan.members, 'broker')}, {plan.note or f'seed {plan.seed}'}"
    )
    begin_s = time.monotonic()
    with live_text(is_shown=is_live) as update:

        def tell(phase: str, counts: Counter[str], done: Counter[str]) -> None:
            update(progress_line(phase, time.monotonic() - begin_s, counts, done))

        tell("starting", Counter(), Counter())
        yield tell


# ---------------------------------------------------------------------------------- the run


_EXPECTED: Final = (MQError, OSError)


@contextmanager
def no_verdict(folder: Path) -> Iterator[None]:
    """Turn what kept a run from its end into *not known*; it is no violation."""
    try:
        yield
    except (MQError, OSError, BaseExceptionGroup) as error:
        leaves = leaves_of(error)
        if any(isinstance(e, InvariantBroken) or not isinstance(e, _EXPECTED) for e in leaves):
            raise
        raise CliError(
            f"the run came to no verdict: {leaves[0]}",
            next_step=f"what there is of it is in {folder}",
            exit_code=ExitCode.USAGE,
        ) from None


def play(plan: Plan, folder: Path, extras: Extras, *, is_live: bool) -> Ran:
    """Play *plan* in *folder*; *is_live*: a person watches the terminal.

    Raises MQError: the cluster did not even start; also within a group.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with progress(plan, is_live=is_live) as tell:
        options = Options(parse_options(extras.set, {}), extras.tree, extras.links, tell)
        if extras.namesrv:
            return trio.run(run_against, tuple(addresses(extras.namesrv)), plan, folder, options)
        return trio.run(run_plan, plan, folder, options)


def verdict_of(ran: Ran) -> Verdict:
    """Return the verdict of all checkers over a run."""
    return merge_for(ran.plan.workload, ran.verdicts)


def judged(ran: Ran) -> dict[str, Any]:
    """Return `result.json` of a run, but for what only the runner knows."""
    return result_of(ran.history, ran.verdicts, verdict_of(ran), ran.faults)


READY_WITHIN_S: Final = 30.0
"""A cluster that runs makes a topic within this."""

DRAIN_WITHIN_S: Final = 120.0
NODE: Final = "drain"
"""Stands for the replicas in the history."""


class RealTime:
    """A `dledger.jepsen_like.workloads.recorder.Stage` that began when it was made."""

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
            with trio.move_on_after(DRAIN_WITHIN_S):
                await clients.drain_on(writing)
                ran.settled = True
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
        *clients.outcome_verdicts(),
        *check_everything(ran.history, promised(plan, ran.settled, is_foreign=True)),
    ]
    write_rest(folder, ran.history)
    write_tables(folder)
    return ran
