"""``dledger-chaos``: break real clusters, record what clients saw, judge it, show it."""

from __future__ import annotations

import datetime
import importlib.util
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter, validators

from dledger.cli.broker_command import parse_options
from dledger.jepsen_like.chaos import limits, loop_disk, namespaces, strace_inject
from dledger.jepsen_like.chaos.plan_draw import Candidates, drawn_plan
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.chaos.run_command import (
    Extras,
    extras_of,
    faults_of,
    folder_of,
    judged,
    no_verdict,
    play,
    repeats,
    show_result,
    show_smallest,
    write_result,
)
from dledger.jepsen_like.chaos.runner import LinksBy, Ran
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.plans.draw import SHAPES
from dledger.jepsen_like.plans.packages import NETWORK, PACKAGES, kinds_named
from dledger.jepsen_like.plans.plan import PROXY_KINDS, Kind, Plan, decode_plan, encode_plan
from dledger.jepsen_like.plans.promised import promised
from dledger.jepsen_like.plans.shrink import shrink
from dledger.jepsen_like.report.run_folder import kept_verdicts
from dledger.jepsen_like.report.wording import many
from dledger.jepsen_like.workloads.presets import PRESETS
from dledger.output import CliError, ExitCode, Output, addresses, note, print_json, show

app = App(
    name="chaos",
    help="Run real clusters under faults, record what clients see, check it.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

DEFAULT_STORE: Final = Path("runs")
ROCKETMQ_LEVELS: Final = "1s 5s 10s 30s"
"""The shortest delay levels that a broker has unless it is configured otherwise."""

MINIMIZE_PLAYS: Final = 24
"""A real run takes as long as its plan."""

EXIT: Final = {"valid": ExitCode.OK, "invalid": ExitCode.FAILED}
UNKNOWN_EXIT: Final = 2

POSITIVE: Final = validators.Number(gt=0)

Store = Annotated[Path, Parameter(help="Folder that holds the folders of runs.")]
RunName = Annotated[str, Parameter(help="Folder of the run: a path, or a name below --store.")]


@app.command(name="list-faults")
def list_faults(*, output: Output = "table") -> int:
    """List faults and packages of faults, and what this machine lacks for each."""
    no_disk, no_strace = loop_disk.why_not(), strace_inject.why_not()
    needs = {
        **dict.fromkeys((Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.DISK_FULL), no_disk),
        **dict.fromkeys((Kind.DISK_SLOW, Kind.FSYNC_ERROR, Kind.BUGGIFY_KILL), no_strace),
        Kind.FD_LIMIT: limits.why_not(),
        **dict.fromkeys(PROXY_KINDS, _why_no_grpc()),
    }
    packages = [
        {
            "name": name,
            "kind": "package",
            "about": about,
            "missing": namespaces.why_not() if name == NETWORK else None,
        }
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
    show(output, "", packages + kinds, ("name", "kind", "about", "missing"))
    return ExitCode.OK


def _why_no_grpc() -> str | None:
    if importlib.util.find_spec("grpc") is None:
        return "grpcio is not installed; the extra proxy has it"
    return None


def _packages_of(kind: Kind) -> str:
    return ", ".join(name for name, (_, kinds) in PACKAGES.items() if kind in kinds)


@app.command(name="list-workloads")
def list_workloads(*, output: Output = "table") -> int:
    """List the workloads by name."""
    rows = [{"name": name, "about": preset.about} for name, preset in PRESETS.items()]
    show(output, "", rows, ("name", "about"))
    return ExitCode.OK


@app.command
def run(
    *,
    workload: Annotated[str, Parameter(help="Name of the workload; see list-workloads.")] = "mixed",
    faults: Annotated[
        str, Parameter(help="Kinds and packages, separated by commas; see list-faults.")
    ] = ("process"),
    time: Annotated[
        float, Parameter(help="Seconds of load and faults.", validator=POSITIVE)
    ] = 60.0,
    rate: Annotated[
        float, Parameter(help="Operations a second that clients aim at.", validator=POSITIVE)
    ] = 2500.0,
    links: Annotated[
        LinksBy | None,
        Parameter(
            help="What breaks links: the runner's proxy, or the kernel, which cuts them so that "
            "packets vanish (root). The kernel when --faults names network."
        ),
    ] = None,
    interval: Annotated[
        float, Parameter(help="Mean seconds between two faults.", validator=POSITIVE)
    ] = 6.0,
    members: Annotated[
        int, Parameter(help="Brokers.", validator=validators.Number(gte=1, lte=7))
    ] = 3,
    name_servers: Annotated[
        int, Parameter(help="NameServers.", validator=validators.Number(gte=1))
    ] = 2,
    seed: Annotated[
        int | None, Parameter(help="Seed of the plan; without it one is drawn.")
    ] = None,
    plan: Annotated[Path | None, Parameter(help="Play this plan instead of drawing one.")] = None,
    set_: Annotated[
        tuple[str, ...] | None,
        Parameter(name="--set", help="Any broker setting, table.name=value; may be repeated."),
    ] = None,
    namesrv: Annotated[
        str, Parameter(help="Load this running cluster, host:port;host:port, and break nothing.")
    ] = "",
    broker_tree: Annotated[
        Path | None,
        Parameter(
            help="Source tree that the brokers run, e.g. another version; default: this one."
        ),
    ] = None,
    store: Store = DEFAULT_STORE,
    name: Annotated[str, Parameter(help="Name of the run's folder; empty: the time.")] = "",
    output: Output = "table",
) -> int:
    """Run a workload under faults. Exit status: 0 valid, 1 invalid, 2 unknown."""
    begin = datetime.datetime.now(tz=datetime.UTC)
    if plan is not None:
        chosen = _plan_in(plan)
    else:
        if workload not in PRESETS:
            raise CliError(
                f"there is no workload {workload!r}",
                next_step="see dledger-chaos list-workloads",
                exit_code=ExitCode.USAGE,
            )
        chosen = drawn_plan(
            int(begin.timestamp()) if seed is None else seed,
            workload,
            faults,
            time,
            rate,
            interval,
            members,
            name_servers,
        )
    _check_proxies(chosen, faults if plan is None else "none", namesrv)
    if broker_tree is not None and not (broker_tree / "dledger").is_dir():
        raise CliError(f"--broker-tree: no dledger in {broker_tree}", exit_code=ExitCode.USAGE)
    if namesrv:
        addresses(namesrv)
        if faults not in ("none", "process"):
            raise CliError(
                "faults are injected into the runner's own brokers only",
                next_step="leave --faults away, or --namesrv",
                exit_code=ExitCode.USAGE,
            )
        levels = msgspec.structs.replace(chosen.settings, delay_levels=ROCKETMQ_LEVELS)
        chosen = msgspec.structs.replace(chosen.with_steps(()), settings=levels)
    links = links or ("kernel" if NETWORK in faults.split(",") else "proxy")
    extras = Extras(
        tuple(set_ or ()), str(broker_tree.resolve()) if broker_tree else "", namesrv, links
    )
    if parse_options(extras.set, {}).get("store.flush_disk_type") == "ASYNC_FLUSH":
        chosen = _with_async_flush(chosen)
    folder = store / (name or begin.strftime("%Y%m%dT%H%M%S"))
    if folder.exists():
        raise CliError(
            f"{folder} is there already", next_step="give another --name", exit_code=ExitCode.USAGE
        )
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(encode_plan(chosen))
    with no_verdict(folder):
        ran = play(chosen, folder, extras, is_live=output != "json")
    end = datetime.datetime.now(tz=datetime.UTC)
    result = judged(ran) | {
        "begin": begin.isoformat(timespec="seconds"),
        "end": end.isoformat(timespec="seconds"),
        **repeats(extras, folder),
        "asked": shlex.join(["dledger-chaos", *_words_of(sys.argv)]),
        "sometimes": dict(sorted(ran.sometimes.items())),
    }
    return _finish(folder, result, output)


def _check_proxies(plan: Plan, faults: str, namesrv: str) -> None:
    """Refuse what cannot be done with the proxies of a plan, or without any.

    Raises:
        CliError: The workload has no proxies for the faults, or the cluster is a foreign one.
        ImportError: The extra of proxies is not installed.
    """
    if not plan.workload.proxies:
        kinds = kinds_named(part for part in faults.split(",") if part) & PROXY_KINDS
        if kinds:
            raise CliError(
                f"no client of this workload goes through a proxy, which {min(kinds)} is for",
                next_step="give --workload grpc",
                exit_code=ExitCode.USAGE,
            )
        return
    if namesrv:
        raise CliError(
            "clients of a running cluster use the SDK, and this workload is for proxies",
            next_step="give another --workload, or leave --namesrv away",
            exit_code=ExitCode.USAGE,
        )
    importlib.import_module("dledger.jepsen_like.chaos.grpc_calls")


def _words_of(argv: Sequence[str]) -> Sequence[str]:
    words = argv[1:]
    return words[1:] if words[:1] == ["chaos"] else words  # it was typed as ``dledger chaos``


def _plan_in(path: Path) -> Plan:
    try:
        return decode_plan(path.read_bytes())
    except OSError as error:
        text = f"--plan {path}: {error.strerror}"
        raise CliError(text, exit_code=ExitCode.USAGE) from None


def _with_async_flush(plan: Plan) -> Plan:
    settings = msgspec.structs.replace(plan.settings, sync_flush=False)
    return msgspec.structs.replace(plan, settings=settings)


def _finish(folder: Path, result: dict[str, Any], output: str) -> int:
    write_result(folder, result)
    if output == "json":
        reported = {
            k: v for k, v in result.items() if k not in ("verdicts", "failover_ms", "counts")
        }
        print_json(reported | {"faults_by_kind": result["faults"], "faults": result["faults_done"]})
    else:
        show_result(result)
        if result["verdict"] == "invalid" and not result["extras"]["namesrv"]:
            note(f"look for a smaller plan that breaks it: dledger-chaos minimize {folder}")
    return EXIT.get(result["verdict"], UNKNOWN_EXIT)


@app.command
def check(name: RunName, /, *, store: Store = DEFAULT_STORE, output: Output = "table") -> int:
    """Check the history of a run again. Exit status: 0 valid, 1 invalid, 2 unknown."""
    folder = folder_of(name, store)
    plan = decode_plan((folder / "plan.json").read_text())
    history, torn_bytes = read_run(folder)
    settled = bool(history.replica_reads)
    is_foreign = bool(extras_of(folder).namesrv)
    verdicts = check_everything(history, promised(plan, settled, is_foreign=is_foreign))
    kept = kept_verdicts(folder, {verdict.checker for verdict in verdicts})
    ran = Ran(plan, folder, [*kept, *verdicts], history, Counter(faults_of(folder)))
    result = judged(ran) | {"torn_bytes": torn_bytes, "report": str(folder / "report.html")}
    if output == "json":
        print_json({k: v for k, v in result.items() if k not in ("failover_ms", "counts")})
    else:
        show_result(result)
    return EXIT.get(result["verdict"], UNKNOWN_EXIT)


@app.command
def report(name: RunName, /, *, store: Store = DEFAULT_STORE) -> int:
    """Write the report of a run again."""
    from dledger.jepsen_like.report.run_report import report as write_report

    print(write_report(folder_of(name, store)))
    return ExitCode.OK


@app.command
def serve(
    *,
    store: Store = DEFAULT_STORE,
    port: Annotated[int, Parameter(help="Port on loopback; 0: any free port.")] = 8090,
) -> int:
    """Show all runs and their reports in a browser, until Ctrl-C."""
    from dledger.jepsen_like.report.serve import listen

    if not store.is_dir():
        raise CliError(
            f"{store} is no folder", next_step="give the --store of a run", exit_code=ExitCode.USAGE
        )
    try:
        with listen(store, port) as server:
            note(f"see http://127.0.0.1:{server.server_port}/")
            server.serve_forever()
    except KeyboardInterrupt:
        note("stopped")
    except OSError as error:
        raise CliError(
            f"port {port} cannot be had: {error.strerror}",
            next_step="give another --port, or 0 for any",
            exit_code=ExitCode.USAGE,
        ) from None
    return ExitCode.OK


@app.command
def minimize(
    name: RunName,
    /,
    *,
    plays: Annotated[
        int,
        Parameter(
            help="Most runs; each takes as long as its plan and some seconds more.",
            validator=validators.Number(gte=1),
        ),
    ] = MINIMIZE_PLAYS,
    store: Store = DEFAULT_STORE,
) -> int:
    """Search for a smaller plan with the same violation.

    Exit status: 0 when a smaller plan was found, else 1.
    """
    folder = folder_of(name, store)
    plan = decode_plan((folder / "plan.json").read_text())
    broken = [v for verdict in kept_verdicts(folder) for v in verdict.violations]
    if not broken:
        raise CliError(
            f"{folder} has no violation",
            next_step="minimize a run that is invalid",
            exit_code=ExitCode.USAGE,
        )
    extras = extras_of(folder)
    if extras.namesrv:
        raise CliError(
            f"{folder} is of a foreign cluster, which plans cannot break", exit_code=ExitCode.USAGE
        )
    wanted = (broken[0].checker, broken[0].name)
    note(
        f"looking for less than {many(len(plan.steps), 'fault')} in "
        f"{plan.duration_ms / 1000:.0f} s that shows {wanted[1]!r} of {wanted[0]} again, "
        f"in {many(plays, 'run')} at most; Ctrl-C keeps the smallest so far"
    )

    def play_one(candidate: Plan, place: Path) -> Ran:
        with no_verdict(place):
            return play(candidate, place, extras, is_live=True)

    candidates = Candidates(folder, wanted, play_one, note)
    try:
        shrink(
            plan, candidates.fails, plays_max=plays, failed_at_ms=broken[0].at_ns // 10**6 or None
        )
    except* KeyboardInterrupt:
        note("stopped")
    page = None
    if (ran := candidates.ran) is not None:
        page = write_result(ran.folder, judged(ran) | repeats(extras, ran.folder))
    return show_smallest(plan, candidates, extras, page)
