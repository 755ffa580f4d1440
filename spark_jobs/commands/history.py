"""``dledger history``: a run's records become tables; synthetic histories of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter

from dledger.cli.progress import progress
from dledger.output import CliError, ExitCode, Output, note, show_facts

app = App(
    name="history",
    help="Convert and generate histories.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

STORE: Final = Path("runs")
Store = Annotated[Path, Parameter(help="Folder that holds the folders of runs.")]
RunName = Annotated[str, Parameter(help="Folder of the run: a path, or a name below --store.")]


PARTS: Final = ("history", "parquet", "ingest.json", "ops.parquet")
"""What makes a folder one of a run or of tables."""


def run_folder(name: str, store: Path) -> Path:
    """Return the folder of a run or of tables. Raises CliError: there is none; a usage error."""
    for folder in (Path(name), store / name):
        if any((folder / part).exists() for part in PARTS):
            return folder
    raise CliError(f"{name} is no run, here or in {store}", exit_code=ExitCode.USAGE)


@app.command
def ingest(name: RunName, /, *, store: Store = STORE, output: Output = "table") -> int:
    """Convert the records of a run to `parquet/`. Exit status 1 when records were bad.

    A torn last record, whose writer was killed, is counted and is not bad.
    """
    from dledger.jepsen_like.history import parquet

    folder = run_folder(name, store)
    counts = parquet.ingest(folder)
    shown = {**msgspec.to_builtins(counts), "parquet": str(folder / parquet.FOLDER)}
    show_facts(output, "Tables", shown, [name for name in shown if name != "versions"])
    if counts.lost_records:
        note(f"{counts.lost_records} records could not be read; see parquet/bad.parquet")
        return ExitCode.FAILED
    return ExitCode.OK


@app.command
def generate(
    *,
    ops: Annotated[int, Parameter(help="Operations over all queues.")],
    out: Annotated[Path, Parameter(help="Folder of the run; its parquet/ is overwritten.")],
    clients: Annotated[int, Parameter(help="Clients that work at the same time.")] = 10,
    queues: Annotated[int, Parameter(help="Queues of the one topic.")] = 4,
    seed: Annotated[int, Parameter(help="Equal seeds give equal histories.")] = 1,
    plant: Annotated[
        str, Parameter(help="Name of an anomaly, for example stale-read; empty: none.")
    ] = "",
    output: Output = "table",
) -> int:
    """Generate a history of any length, correct or with one planted anomaly."""
    from dledger.spark_jobs.generate.history import Shape, planter_named
    from dledger.spark_jobs.generate.history import generate as make

    if plant:
        planter_named(plant)
    with progress(ops, "operations") as line:
        made = make(Shape(ops, clients, queues, seed, plant), out, line.to)
    show_facts(output, "History", {**msgspec.to_builtins(made), "run": str(out)})
    return ExitCode.OK


app.command(
    "dledger.spark_jobs.commands.bench:bench",
    name="bench",
    help="Measure how fast histories are checked.",
)
