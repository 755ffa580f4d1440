"""``dledger demo``: a preset of the chaos runner that kills the leader under load.

One plan, three or five brokers, one fault. The clients, the record, the checks and the report are
those of ``dledger-chaos run``; only the words on the screen are for people that see it first.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import structlog
import trio
from cyclopts import Parameter, validators

from dledger.jepsen_like.chaos.plan_draw import SETTINGS
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.chaos.run_command import (
    Extras,
    faults_of,
    judged,
    no_verdict,
    repeats,
    verdict_of,
    write_result,
)
from dledger.jepsen_like.chaos.run_result import DOUBLED, LOST
from dledger.jepsen_like.chaos.runner import FINAL_READ, Options, Ran, read_replicas, run_plan
from dledger.jepsen_like.checkers import replicas
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.history.operation import Event, History
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, decode_plan, encode_plan
from dledger.jepsen_like.plans.promised import promised
from dledger.jepsen_like.report.run_folder import PLAN_FILE, kept_verdicts
from dledger.jepsen_like.report.wording import many
from dledger.jepsen_like.workloads.presets import workload_for
from dledger.output import CliError, ExitCode, Output, note, print_json, print_table

WORKLOAD: Final = "demo"
SEED: Final = 1
RATE: Final = 6_000.0
"""Operations a second that clients aim at: about as much as one process of clients does."""

TICK_S: Final = 1.0
KEPT: Final = "Every acknowledged message is there."


def demo_plan(members: int, seconds: float, rate: float) -> Plan:
    """Return the plan: load, SIGKILL to the leader, half as long without it, all three again."""
    load_ms = round(1000 * seconds)
    return Plan(
        seed=SEED,
        duration_ms=2 * load_ms,
        steps=(Step(load_ms, Kind.KILL, "leader", for_ms=load_ms // 2),),
        members=members,
        name_servers=1,
        workload=workload_for(WORKLOAD, rate),
        settings=SETTINGS,
        note="the demo",
    )


def demo(
    *,
    brokers: Annotated[int, Parameter(help="Members of the group: 3 or 5.")] = 3,
    seconds: Annotated[
        float,
        Parameter(
            help="Seconds of load before the kill, and again after it.",
            validator=validators.Number(gt=0),
        ),
    ] = 4.0,
    rate: Annotated[
        float,
        Parameter(
            help="Operations a second that clients aim at.", validator=validators.Number(gt=0)
        ),
    ] = RATE,
    keep: Annotated[
        Path | None, Parameter(help="Keep data, logs, history and report in this folder.")
    ] = None,
    check: Annotated[
        Path | None, Parameter(help="Check a folder that --keep wrote; run nothing.")
    ] = None,
    output: Output = "table",
) -> int:
    """Start a cluster, kill its leader under load, restart it, and check what clients recorded.

    Exit 0: everything acknowledged is there, in order, and the replicas are equal. Exit 1: not so.
    ``dledger-chaos run`` does the same with other faults, workloads and settings.
    """
    if check is not None:
        return show(check_again(check), output)
    if brokers not in (3, 5):
        raise CliError("--brokers: 3 or 5, fewer do not survive a kill", exit_code=ExitCode.USAGE)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise CliError(f"{keep} is not empty", exit_code=ExitCode.USAGE)
    folder = keep or Path(tempfile.mkdtemp(prefix="dledger-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = demo_plan(brokers, seconds, rate)
    (folder / PLAN_FILE).write_text(encode_plan(plan))
    remove = keep is None
    try:
        ran = run_demo(plan, folder)
        result = facts_of(ran)
        remove = remove and result["kept"]
        if not remove:
            result["report"] = str(write_result(folder, judged(ran) | repeats(Extras(), folder)))
    except Exception:
        # Ctrl-C is no Exception: a person that breaks off does not want the data.
        remove = False
        note(f"data and logs are kept in {folder}")
        raise
    finally:
        if remove:
            shutil.rmtree(folder, ignore_errors=True)
    code = show(result, output)
    if not remove:
        note(f"kept in {folder}; check again: dledger demo --check {folder}")
    return code


def run_demo(plan: Plan, folder: Path) -> Ran:
    """Play *plan* in *folder* and tell a person on standard error what happens.

    Raises CliError: the cluster did not start; nothing was tested.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    story = Story(plan, note)
    options = Options(on_progress=story.progress, on_event=story.event)
    with no_verdict(folder):
        return trio.run(run_plan, plan, folder, options)


class Story:
    """Turns events and counters of a run into lines for a person."""

    def __init__(
        self, plan: Plan, tell: Callable[[str], object], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._now_s = now_s
        self._begin_s = now_s()
        self._phase = ""
        self._leader = ""
        self._last_s = 0.0
        self._last_acknowledged = 0
        self._say(f"starting a NameServer and {many(plan.members, 'broker')}")

    def event(self, event: Event, is_over: bool) -> None:
        """Write a line about a fault or a new leader."""
        if event.kind == "role" and event.detail.startswith("leader"):
            if event.node != self._leader:
                self._leader = event.node
                self._say(f"{event.node} leads, {event.detail.removeprefix('leader ')}")
        elif event.kind == Kind.KILL and is_over:
            self._say(f"started {event.node} again")
        elif event.kind == Kind.KILL:
            self._say(f"SIGKILL to {self._leader or 'the leader'}, the leader")

    def progress(self, phase: str, counts: Counter[str], _faults: Counter[str]) -> None:
        """Write a line about the load once a second, and one when a phase begins."""
        elapsed_s = self._now_s() - self._begin_s
        acknowledged = counts["send_ok"]
        if phase != self._phase:
            self._phase = phase
            if phase in PHASES:
                self._say(PHASES[phase])
        elif phase == LOAD and elapsed_s - self._last_s >= TICK_S:
            rate = (acknowledged - self._last_acknowledged) / (elapsed_s - self._last_s)
            self._say(f"{acknowledged:>9,} acknowledged  {rate:>8,.0f}/s")
        else:
            return
        self._last_s, self._last_acknowledged = elapsed_s, acknowledged

    def _say(self, line: str) -> None:
        self._tell(f"{self._now_s() - self._begin_s:6.1f} s  {line}")


LOAD: Final = "load and faults"
PHASES: Final = {
    LOAD: "clients send and read",
    "healing": "no more load; every broker runs",
    "settling": "waiting until all replicas have applied the same; reading every queue",
}


# -- the result -----------------------------------------------------------------------------------

MEANINGS: Final = {
    "acknowledged": "messages whose send was answered with success",
    "lost": "acknowledged, and missing for consumers or on a replica; must be 0",
    "duplicated": "stored twice; must be 0",
    "broken": "other violations; must be 0",
    "not_stored": "sends that ended with: not stored",
    "unknown": "sends that ended with: unknown",
    "delivered": "messages read back from the replicas",
    "failover_ms": "from SIGKILL to the next acknowledgement",
    "replicas_equal": "equal chain checksums, tables and queues on all replicas",
}


def facts_of(ran: Ran) -> dict[str, Any]:
    """Return what the demo shows of a run."""
    verdict = verdict_of(ran)
    result = judged(ran)
    sends = result["counts"].get("send", {})
    by_name = {each.checker: each for each in ran.verdicts}
    equal = by_name.get(replicas.NAME)
    named = {LOST, *DOUBLED}
    return {
        "kept": verdict.is_valid,
        "verdict": verdict.validity,
        "reason": verdict.reason,
        "acknowledged": result["acknowledged_sends"],
        "lost": result["lost"],
        "duplicated": result["duplicated"],
        "broken": sum(violation.name not in named for violation in verdict.violations),
        "not_stored": sends.get("fail", 0),
        "unknown": sends.get("info", 0),
        "delivered": sum(map(len, _drained(ran.history))),
        "failover_ms": result["failover_max_ms"],
        "replicas_equal": equal is not None and equal.is_valid and FINAL_READ not in by_name,
        "checked": sorted(each.checker for each in ran.verdicts if each.is_valid),
        "violations": msgspec.to_builtins(list(verdict.violations)),
        "folder": str(ran.folder),
    }


def _drained(history: History) -> list[tuple[int, ...]]:
    """Return the values of each queue of the replica that was read first."""
    first = next((read.node for read in history.replica_reads), None)
    return [read.values for read in history.replica_reads if read.node == first]


def check_again(folder: Path) -> dict[str, Any]:
    """Judge a kept run again, from what its clients recorded and its brokers' data folders.

    Raises CliError: there is no run; a usage error.
    """
    if not (folder / PLAN_FILE).is_file():
        raise CliError(
            f"{folder} holds no run: {PLAN_FILE} is missing",
            next_step="make one with dledger demo --keep DIR",
            exit_code=ExitCode.USAGE,
        )
    plan = decode_plan((folder / PLAN_FILE).read_text())
    history, torn_bytes = read_run(folder)
    if torn_bytes:
        note(f"{torn_bytes} bytes at the end of the record are torn")
    read_at_ns = max((state.at_ns for state in history.replica_states), default=0)
    history.replica_reads.clear()
    history.replica_states.clear()
    history.floors.clear()
    nodes = folder / "nodes"
    names = [f"n{number}" for number in range(plan.members)]
    found = read_replicas(
        {name: nodes / f"{name}.toml" for name in names},
        history,
        read_at_ns,
        stores={name: nodes / name for name in names},
    )
    found += check_everything(history, promised(plan, settled=True))
    kept = kept_verdicts(folder, {FINAL_READ, *(verdict.checker for verdict in found)})
    return facts_of(Ran(plan, folder, [*kept, *found], history, Counter(faults_of(folder))))


def show(facts: dict[str, Any], output: str) -> int:
    """Print what the run showed and return the exit status."""
    code = ExitCode.OK if facts["kept"] else ExitCode.FAILED
    if output == "json":
        print_json(facts)
        return code
    rows = [(n.replace("_", " "), _text_of(facts[n]), meaning) for n, meaning in MEANINGS.items()]
    print_table("", ["what", "result", "meaning"], rows)
    for violation in facts["violations"][:VIOLATIONS_SHOWN]:
        words = f"{violation['checker']}: {violation['name']}, {violation['subject']}"
        print(f"{words}: {violation['detail']}")
    if facts["kept"]:
        print(f"{KEPT} Checked: {', '.join(facts['checked'])}.")
    elif facts["verdict"] == "unknown":
        print(f"Not known: {facts['reason']}. See {facts['folder']}")
    else:
        print(f"The check found a violation. See {facts['folder']}")
    if "report" in facts:
        print(f"report: {facts['report']}")
    return code


VIOLATIONS_SHOWN: Final = 5


def _text_of(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "-"
