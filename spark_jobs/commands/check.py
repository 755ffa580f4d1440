"""``dledger check``: the verdict over a history of any length."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter, validators

from dledger.cli.progress import progress
from dledger.commitlog.errors import ConfigError, MQError
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.columns import RowOutOfRangeError
from dledger.jepsen_like.history.operation import CorruptHistoryError
from dledger.jepsen_like.history.parquet import NoHistoryError
from dledger.output import CliError, ExitCode, Output, note, print_json, print_table
from dledger.spark_jobs import live
from dledger.spark_jobs.commands.history import STORE, RunName, Store, run_folder
from dledger.spark_jobs.commands.progress import task_lines
from dledger.spark_jobs.run import Engine, Outcome, judge_run, no_verdict, path_of, records
from dledger.spark_jobs.tables import keep_memory

EXIT: Final = {"valid": ExitCode.OK, "invalid": ExitCode.FAILED}
UNKNOWN_EXIT: Final = 2
SHOWN_MAX: Final = 10
"""Anomalies in the table for people; JSON has all that are named."""


def check(
    name: RunName,
    /,
    *,
    engine: Annotated[
        Engine, Parameter(help="local: numpy in this process; spark: many tasks.")
    ] = "local",
    master: Annotated[str, Parameter(help="Spark's URL; empty: the cores of this machine.")] = "",
    follow: Annotated[
        bool,
        Parameter(help="Check a run while it goes on, batch by batch, and the whole at its end."),
    ] = False,
    late_max_ms: Annotated[
        int | None,
        Parameter(
            help="How late a delayed message may come, time without a leader included; not given: "
            "as late as it likes. All other guarantees are in the plan of the run.",
            validator=validators.Number(gte=0),
        ),
    ] = None,
    store: Store = STORE,
    output: Output = "table",
) -> int:
    """Judge the history of a run or of a folder of tables.

    A run is a path, a name under --store, or an address (file://, s3://). Exit: 0 valid, 1 invalid,
    2 unknown.
    """
    try:
        run = path_of(name)
        if isinstance(run, Path):
            run = run_folder(str(run), store)
        return check_run(run, engine, master, late_max_ms, output, is_followed=follow)
    except (CliError, ConfigError, BrokenPipeError):
        raise
    except (MQError, OSError) as error:
        # Exit status 1 means an invalid history: nothing else may end with it.
        show(no_verdict(str(error)), output)
        return UNKNOWN_EXIT


def check_run(
    run: Path | str,
    engine: Engine,
    master: str,
    late_max_ms: int | None,
    output: Output,
    *,
    is_followed: bool,
) -> int:
    """Judge a run or a folder of tables, print the answer, and return the exit status.

    Raises NoJavaError: Spark is to judge, and there is no Java runtime.
    """
    if is_followed:
        why = follow_run(run, engine, master)
        if why:
            show(no_verdict(why), output)
            return UNKNOWN_EXIT
    report = note if engine != "local" or output != "json" else _silent
    with (
        progress(records(run), "operations") as line,
        nullcontext() if engine == "local" else task_lines(note) as on_spark,
    ):
        keep_memory()
        outcome = judge_run(
            run,
            engine,
            time.monotonic,
            master=master,
            report=report,
            on_rows=line.to,
            on_spark=on_spark or _silent,
            late_max_ns=None if late_max_ms is None else late_max_ms * 1_000_000,
        )
    show(outcome, output)
    return EXIT.get(outcome.verdict, UNKNOWN_EXIT)


def follow_run(run: Path | str, engine: Engine, master: str) -> str:
    """Print what is wrong as soon as it is, until the run has left its result.

    Returns:
        Why the run cannot be followed, one sentence; empty: it was followed to its end.
    """
    if not isinstance(run, Path):
        return f"{run} is an address: only a run on this machine can be followed"
    try:
        _follow(run, engine, master)
    except (NoHistoryError, CorruptHistoryError, RowOutOfRangeError, OSError) as error:
        return f"{error}: copy the run again, or judge what can be read without --follow"
    return ""


def _follow(folder: Path, engine: Engine, master: str) -> None:

    def is_over() -> bool:
        return (folder / "result.json").is_file()

    if engine == "local":
        live.follow(folder, _print_progress, time.sleep, is_over)
    else:
        from dledger.spark_jobs.engines.session import open_session
        from dledger.spark_jobs.engines.stream import follow_with_spark

        follow_with_spark(open_session(master), folder, _print_queues, time.sleep, is_over)


def _print_progress(progress: live.Progress) -> None:
    _print_violations(progress.violations)
    note(
        f"{progress.operations:,} operations judged, {progress.open:,} open, "
        f"{progress.in_flight:,} offsets in flight, {progress.pending:,} sends pending"
    )


def _print_queues(found: list[Any]) -> None:
    for queue in found:
        _print_violations(queue.violations)
    rows, flying = (sum(getattr(q, name) for q in found) for name in ("rows", "in_flight"))
    note(f"{len(found)} queues: {rows:,} operations judged, {flying:,} offsets in flight")


def _print_violations(violations: list[Violation]) -> None:
    for one in violations:
        note(f"INVALID: {one.name} in {one.subject}: {one.detail}, operations {one.operations}")


def _silent(_: object) -> None:
    """Print nothing: a program reads the output."""


def show(outcome: Outcome, output: str) -> None:
    """Print an outcome for people or for programs."""
    answer: dict[str, Any] = msgspec.to_builtins(outcome)
    if output == "json":
        print_json(answer)
        return
    names = ("verdict", "reason", "operations", "seconds", "digest")
    print_table("Check", ["what", "value"], [[n, answer[n]] for n in names if answer[n] != ""])
    print_table(
        "Checks",
        ["checker", "verdict", "violations", "looked at"],
        [
            [
                verdict.checker,
                verdict.validity,
                len(verdict.violations),
                verdict.reason or ", ".join(f"{k} {v:,}" for k, v in verdict.counts.items()),
            ]
            for verdict in outcome.verdicts
        ],
    )
    if outcome.anomalies:
        columns = ("checker", "name", "subject", "detail", "operations")
        rows = [[str(one[c]) for c in columns] for one in outcome.anomalies[:SHOWN_MAX]]
        print_table("Anomalies", columns, rows)
