"""``dledger-chaos``: break real clusters, record what clients saw, judge it, show it."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import structlog
import trio
from cyclopts import App, Parameter

from dledger.cli.broker_command import parse_options
from dledger.cli.output import (
    CliError,
    ExitCode,
    Output,
    addresses,
    note,
    print_json,
    print_table,
)
from jepsen_like.chaos import loop_disk, strace_inject
from jepsen_like.chaos.foreign import run_against
from jepsen_like.chaos.outcome import merged, result_of
from jepsen_like.chaos.recorder import encode_json, read_run
from jepsen_like.chaos.runner import Options, Ran, clock_error_ns, run_plan
from jepsen_like.checkers.all_checks import check_everything
from jepsen_like.checkers.verdict import Verdict, Violation
from jepsen_like.plans.draw import SHAPES, draw_plan
from jepsen_like.plans.packages import PACKAGES, kinds_named
from jepsen_like.plans.plan import Kind, Plan, Settings, decode_plan, encode_plan
from jepsen_like.plans.shrink import shrink
from jepsen_like.workloads.presets import PRESETS, workload_for

app = App(
    name="chaos",
    help="Break real clusters, record what clients saw, judge it.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

DEFAULT_STORE: Final = Path("runs")
FASTER: Final = 4.0
"""Plans are drawn for the slow timers of the simulator; real elections are so much faster."""

SETTINGS: Final = Settings(
    heartbeat_ms=100,
    election_ms=800,
    segment_bytes=16 << 20,
    queue_units=30_000,
    checkpoint_ms=3_000,
    register_ms=5_000,
    delay_levels="1s 2s 5s 10s",
)
ROCKETMQ_LEVELS: Final = "1s 5s 10s 30s"
"""The shortest delay levels that a broker has unless it is configured otherwise."""

MINIMIZE_PLAYS: Final = 24
"""A real run takes as long as its plan."""

EXIT: Final = {"valid": ExitCode.OK, "invalid": ExitCode.FAILED}
UNKNOWN_EXIT: Final = 2

Store = Annotated[Path, Parameter(help="Folder with a folder for each run.")]
RunName = Annotated[str, Parameter(help="A path, or a name under --store.")]


@app.command(name="list-faults")
def list_faults(*, output: Output = "table") -> int:
    """Show every fault and package of faults, and what this machine lacks for it."""
    no_disk, no_strace = loop_disk.why_not(), strace_inject.why_not()
    needs = {
        **dict.fromkeys((Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.DISK_FULL), no_disk),
        **dict.fromkeys((Kind.DISK_SLOW, Kind.FSYNC_ERROR, Kind.BUGGIFY_KILL), no_strace),
    }
    packages = [
        {"name": name, "kind": "package", "about": about, "missing": None}
        for name, (about, _) in PACKAGES.items()
    ]
    kinds = [
        {
            "name": kind.value,
            "kind": "fault",
            "about": _packages_of(kind),
            "missing": needs.get(kind),
        }
        for kind in SHAPES
    ]
    if output == "json":
        print_json(packages + kinds)
    else:
        columns = ["name", "kind", "about", "missing"]
        rows = [[row[name] for name in columns] for row in packages + kinds]
        print_table("", columns, rows)
    return ExitCode.OK


def _packages_of(kind: Kind) -> str:
    return ", ".join(name for name, (_, kinds) in PACKAGES.items() if kind in kinds)


@app.command(name="list-workloads")
def list_workloads(*, output: Output = "table") -> int:
    """Show the workloads that have a name."""
    rows = [{"name": name, "about": preset.about} for name, preset in PRESETS.items()]
    if output == "json":
        print_json(rows)
    else:
        print_table("", ["name", "about"], [[row["name"], row["about"]] for row in rows])
    return ExitCode.OK


@app.command
def run(
    *,
    workload: Annotated[str, Parameter(help="See list-workloads.")] = "mixed",
    faults: Annotated[str, Parameter(help="Kinds and packages with commas; see list-faults.")] = (
        "process"
    ),
    time: Annotated[float, Parameter(help="Seconds of load and faults.")] = 60.0,
    rate: Annotated[float, Parameter(help="Operations a second that clients aim at.")] = 1500.0,
    interval: Annotated[float, Parameter(help="Mean seconds between two faults.")] = 4.0,
    members: Annotated[int, Parameter(help="Brokers.")] = 3,
    name_servers: Annotated[int, Parameter(help="NameServers.")] = 2,
    seed: Annotated[int | None, Parameter(help="Of the plan; drawn when it is not given.")] = None,
    plan: Annotated[Path | None, Parameter(help="Play this plan instead of drawing one.")] = None,
    set_: Annotated[
        tuple[str, ...] | None,
        Parameter(name="--set", help="Any broker setting, table.name=value."),
    ] = None,
    namesrv: Annotated[
        str, Parameter(help="Load this running cluster, host:port;host:port, and break nothing.")
    ] = "",
    mutant: Annotated[
        int, Parameter(help="Number of a planted bug in the brokers, to test the tester.")
    ] = 0,
    store: Store = DEFAULT_STORE,
    name: Annotated[str, Parameter(help="Folder of the run; empty: the time.")] = "",
    output: Output = "table",
) -> int:
    """Run a workload while faults happen. Exit status: 0 valid, 1 invalid, 2 not known."""
    begin = datetime.datetime.now(tz=datetime.UTC)
    if plan is not None:
        chosen = decode_plan(plan.read_text())
    else:
        if workload not in PRESETS:
            raise CliError(
                f"there is no workload {workload!r}",
                next_step="see dledger-chaos list-workloads",
                exit_code=ExitCode.USAGE,
            )
        chosen = _drawn(
            int(begin.timestamp()) if seed is None else seed,
            workload,
            faults,
            time,
            rate,
            interval,
            members,
            name_servers,
        )
    if namesrv:
        if faults not in ("none", "process"):
            raise CliError(
                "faults are injected into the runner's own brokers only",
                next_step="leave --faults away, or --namesrv",
                exit_code=ExitCode.USAGE,
            )
        levels = msgspec.structs.replace(chosen.settings, delay_levels=ROCKETMQ_LEVELS)
        chosen = msgspec.structs.replace(chosen.with_steps(()), settings=levels)
    settings = parse_options(set_ or (), {})
    if settings.get("store.flush_disk_type") == "ASYNC_FLUSH":
        chosen = _with_async_flush(chosen)
    folder = store / (name or begin.strftime("%Y%m%dT%H%M%S"))
    if folder.exists():
        raise CliError(f"{folder} is there already", exit_code=ExitCode.USAGE)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(encode_plan(chosen))
    ran = _play(chosen, folder, settings, mutant, output, namesrv)
    end = datetime.datetime.now(tz=datetime.UTC)
    result = _judged(ran) | {
        "begin": begin.isoformat(timespec="seconds"),
        "end": end.isoformat(timespec="seconds"),
        "command": f"dledger-chaos run --plan {folder / 'plan.json'}",
        "asked": shlex.join(["dledger-chaos", *sys.argv[1:]]),
        "sometimes": dict(sorted(ran.sometimes.items())),
    }
    return _finish(folder, result, output)


def _drawn(
    seed: int,
    workload: str,
    faults: str,
    seconds: float,
    rate: float,
    interval: float,
    members: int,
    name_servers: int,
) -> Plan:
    kinds = kinds_named(part for part in faults.split(",") if part)
    drawn = draw_plan(
        seed,
        seconds * FASTER,
        members=members,
        fault_interval_s=interval * FASTER,
        kinds=kinds,
        workload=workload_for(workload, rate),
        settings=SETTINGS,
        even=True,
    ).faster(FASTER)
    return msgspec.structs.replace(drawn, name_servers=name_servers)


def _with_async_flush(plan: Plan) -> Plan:
    settings = msgspec.structs.replace(plan.settings, sync_flush=False)
    return msgspec.structs.replace(plan, settings=settings)


def _play(
    plan: Plan,
    folder: Path,
    settings: dict[str, object],
    mutant: int,
    output: str,
    namesrv: str = "",
) -> Ran:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with _Progress(output, plan) as tell:
        options = Options(settings, mutant, tell)
        if namesrv:
            return trio.run(run_against, tuple(addresses(namesrv)), plan, folder, options)
        return trio.run(run_plan, plan, folder, options)


class _Progress:
    """Counters on the screen while a run goes on; nothing for programs."""

    def __init__(self, output: str, plan: Plan) -> None:
        self._silent = output == "json" or not sys.stderr.isatty()
        self._plan = plan
        self._live: Any = None

    def __enter__(self) -> Callable[[str, Counter[str], Counter[str]], None]:
        note(
            f"{len(self._plan.steps)} faults in {self._plan.duration_ms / 1000:.0f} s against "
            f"{self._plan.members} brokers, seed {self._plan.seed}"
        )
        if not self._silent:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _tell(self, phase: str, counts: Counter[str], done: Counter[str]) -> None:
        if self._live is not None:
            ended = {
                word: sum(n for name, n in counts.items() if name.endswith(word))
                for word in ("ok", "info", "fail")
            }
            faults = sum(n for kind, n in done.items() if kind != "skipped")
            self._live.update(
                f"{phase}: {ended['ok']:,} ok, {ended['info']:,} unknown, "
                f"{ended['fail']:,} failed, {faults} faults, {done['skipped']} skipped"
            )


def _judged(ran: Ran) -> dict[str, Any]:
    workload = ran.plan.workload
    verdict = merged(
        ran.verdicts,
        delayed=workload.delayed_per_mille > 0,
        commits=workload.consumers > 0,
    )
    return result_of(ran.history, ran.verdicts, verdict, ran.faults)


def _finish(folder: Path, result: dict[str, Any], output: str) -> int:
    from jepsen_like.report.run_report import report as write_report

    (folder / "result.json").write_bytes(encode_json(result))
    page = write_report(folder)
    result["report"] = str(page)
    (folder / "result.json").write_bytes(encode_json(result))
    if output == "json":
        told = {k: v for k, v in result.items() if k not in ("verdicts", "failover_ms", "counts")}
        print_json(told | {"faults_by_kind": result["faults"], "faults": result["faults_done"]})
    else:
        _show(result)
    return EXIT.get(result["verdict"], UNKNOWN_EXIT)


def _show(result: dict[str, Any]) -> None:
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
    print_table("Run", ["what", "value"], [[a, str(b)] for a, b in rows if b not in ("", None)])
    found = [violation for verdict in result["verdicts"] for violation in verdict["violations"]]
    if found:
        print_table(
            "Violations",
            ["checker", "name", "where", "what", "operations"],
            [
                [v["checker"], v["name"], v["subject"], v["detail"], str(list(v["operations"]))]
                for v in found[:10]
            ],
        )
    if result["skipped"]:
        print_table(
            "Skipped",
            ["fault", "times", "why"],
            [[row["kind"], row["count"], row["reason"]] for row in result["skipped"]],
        )


def _folder(name: str, store: Path) -> Path:
    for folder in (Path(name), store / name):
        if (folder / "plan.json").is_file():
            return folder
    raise CliError(f"{name} is no run, here or in {store}", exit_code=ExitCode.USAGE)


@app.command
def check(name: RunName, /, *, store: Store = DEFAULT_STORE, output: Output = "table") -> int:
    """Judge the history of a run again. Exit: 0 valid, 1 invalid, 2 not known."""
    folder = _folder(name, store)
    plan = decode_plan((folder / "plan.json").read_text())
    history, torn_bytes = read_run(folder)
    settled = bool(history.replica_reads)
    verdicts: list[Verdict] = check_everything(
        history, settled=settled, clock_error_ns=clock_error_ns(plan)
    )
    before = _before(folder)
    kept = [verdict for verdict in before if verdict.checker not in {v.checker for v in verdicts}]
    ran = Ran(plan, folder, [*kept, *verdicts], history, Counter(_faults(folder)))
    result = _judged(ran) | {"torn_bytes": torn_bytes, "report": str(folder / "report.html")}
    if output == "json":
        print_json({k: v for k, v in result.items() if k not in ("failover_ms", "counts")})
    else:
        _show(result)
    return EXIT.get(result["verdict"], UNKNOWN_EXIT)


def _before(folder: Path) -> list[Verdict]:
    """Verdicts that no history holds: liveness, and files that could not be read."""
    path = folder / "result.json"
    if not path.is_file():
        gone = Violation("the run did not end", "runner", "it has no result.json")
        return [Verdict("run", "unknown", reason=gone.detail)]
    told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return msgspec.convert(told.get("verdicts", []), type=list[Verdict])


def _faults(folder: Path) -> dict[str, int]:
    path = folder / "result.json"
    if not path.is_file():
        return {}
    told: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return dict(told.get("faults", {}))


@app.command
def report(name: RunName, /, *, store: Store = DEFAULT_STORE) -> int:
    """Draw the report of a run again."""
    from jepsen_like.report.run_report import report as write_report

    print(write_report(_folder(name, store)))
    return ExitCode.OK


@app.command
def serve(
    *,
    store: Store = DEFAULT_STORE,
    port: Annotated[int, Parameter(help="Port on loopback; 0: any that is free.")] = 8090,
) -> int:
    """Show all runs and their reports in a browser, until Ctrl-C."""
    from jepsen_like.report.serve import serve as serve_runs

    try:
        serve_runs(store, port=port, on_listening=lambda address: note(f"see {address}"))
    except KeyboardInterrupt:
        note("stopped")
    return ExitCode.OK


@app.command
def minimize(
    name: RunName,
    /,
    *,
    plays: Annotated[int, Parameter(help="Runs at most; each takes as long as its plan.")] = (
        MINIMIZE_PLAYS
    ),
    store: Store = DEFAULT_STORE,
) -> int:
    """Look for a smaller plan that breaks the same promise, by running candidates."""
    folder = _folder(name, store)
    plan = decode_plan((folder / "plan.json").read_text())
    broken = [v for verdict in _before(folder) for v in verdict.violations]
    if not broken:
        raise CliError(f"{folder} broke no promise", exit_code=ExitCode.USAGE)
    wanted = (broken[0].checker, broken[0].name)
    tried = 0

    def fails(candidate: Plan) -> bool:
        nonlocal tried
        tried += 1
        place = folder / "minimize" / str(tried)
        place.mkdir(parents=True)
        ran = _play(candidate, place, {}, 0, "json")
        found = {(v.checker, v.name) for verdict in ran.verdicts for v in verdict.violations}
        note(f"{tried}: {len(candidate.steps)} steps: {'fails' if wanted in found else 'passes'}")
        return wanted in found

    small, used = shrink(
        plan, fails, plays_max=plays, failed_at_ms=broken[0].at_ns // 10**6 or None
    )
    path = folder / "minimized.json"
    path.write_text(encode_plan(small))
    note(f"{len(plan.steps)} steps became {len(small.steps)} in {used} runs: {path}")
    note(f"dledger-chaos run --plan {path}")
    return ExitCode.OK


def main() -> None:
    """Be the command ``dledger-chaos``."""
    from dledger.cli.main import main as dledger

    sys.exit(dledger(["chaos", *sys.argv[1:]]))
