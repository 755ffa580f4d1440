"""``dledger audit``: are the data folders of several replicas equal up to the commit point?"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

from dledger.cli.progress import progress
from dledger.output import CliError, ExitCode, Output, note, print_table, show_facts
from dledger.spark_jobs.audit.compare import audit as audit_folders
from dledger.spark_jobs.audit.segment_report import Report
from dledger.spark_jobs.commands.progress import task_lines

EXIT: Final = {"equal": ExitCode.OK, "parted": ExitCode.FAILED}
UNKNOWN_EXIT: Final = 2
SHOWN_MAX: Final = 20
"""Differences in the table for people; JSON has all that are named."""


def audit(
    *folders: Annotated[Path, Parameter(help="Data folders, one of each replica.")],
    engine: Annotated[
        Literal["local", "spark"],
        Parameter(help="local: this process; spark: a task for each segment."),
    ] = "local",
    master: Annotated[str, Parameter(help="Spark's URL; empty: the cores of this machine.")] = "",
    output: Output = "table",
) -> int:
    """Compare replicas' data folders, changing nothing. Exit: 0 equal, 1 parted, 2 unknown.

    A folder that a broker is running on is read as it is.
    """
    if len(folders) < 2:
        raise CliError("name at least two data folders of one group", exit_code=ExitCode.USAGE)
    doer = None
    with (
        progress(0, "segments") as line,
        nullcontext() if engine == "local" else task_lines(note) as on_spark,
    ):
        if on_spark is not None:
            from dledger.spark_jobs.engines.session import open_session
            from dledger.spark_jobs.engines.spark import SparkDoer

            session = open_session(master)
            on_spark(session.sparkContext.statusTracker())
            doer = SparkDoer(session)
        report = audit_folders([folder.resolve() for folder in folders], doer, line.to)
    show(report, output)
    return EXIT.get(report.verdict, UNKNOWN_EXIT)


NAMES: Final = (
    *("verdict", "reason", "commit_index", "commit_position", "entries", "records"),
    *("units", "keys", "finding_count"),
)
"""Of a report, in the table for people."""


def show(report: Report, output: str) -> None:
    """Print a report for people or for programs."""
    shown: dict[str, Any] = {**msgspec.to_builtins(report), "digest": report.digest}
    show_facts(output, "Audit", shown, NAMES)
    if output == "json":
        return
    columns = ("replica", "first_index", "last_index", "commit_index", "end_position", "running")
    replicas = [[getattr(one, name) for name in columns] for one in report.replicas]
    if replicas:
        print_table("Replicas", [name.replace("_", " ") for name in columns], replicas)
    if report.findings:
        columns = ("replica", "kind", "file", "byte", "index", "detail")
        found = [[getattr(f, name) for name in columns] for f in report.findings[:SHOWN_MAX]]
        print_table("Differences", columns, found)
    if report.notes:
        print_table("Notes", ["replica", "note"], [[n.replica, n.text] for n in report.notes])
