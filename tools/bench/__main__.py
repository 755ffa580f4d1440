"""``python -m tools.bench``: NATS, RocketMQ and this project, measured in turn on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import trio
from cyclopts import App, Parameter

from dledger.cli.bench_command import flush_ms
from dledger.cli.main import run as run_app
from dledger.output import CliError, ExitCode, note
from tools.bench.figures import Measured
from tools.bench.picture import draw
from tools.bench.plan import chains_of, estimate_s, plan
from tools.bench.rounds import Settings, play
from tools.bench.table import Machine, as_json, as_markdown, report_of, spliced
from tools.bench.tools import fetch

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build" / "peers"
PAGE: Final = ROOT / "docs" / "operate" / "performance.md"
BESIDE_PAGE: Final = PAGE.parent / "peers"
QUIET: Final = 0.5
"""A load average above this: figures are those of a busy machine."""

app = App(
    name="peers",
    help="Measure NATS, RocketMQ and this project in turn.",
    backend="trio",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)


@app.default
async def measure(
    *,
    rounds: Annotated[int, Parameter(help="Each has every contender once.")] = 3,
    seconds: Annotated[float, Parameter(help="Measured of each load.")] = 5.0,
    warm: Annotated[float, Parameter(help="Seconds of the same load before them.")] = 2.0,
    warm_brokers: Annotated[
        float, Parameter(help="Seconds of sends after a start, not measured.")
    ] = 4.0,
    kills: Annotated[int, Parameter(help="Of our leader with our SDK, each round.")] = 10,
    backlog: Annotated[int, Parameter(help="Messages to drain, a multiple of 1,000.")] = 100_000,
    minutes: Annotated[float, Parameter(help="No load is begun after these.")] = 23.0,
    only: Annotated[
        tuple[str, ...], Parameter(help="A contender, a load, or both: nats, 64, nats/64.")
    ] = (),
    folder: Annotated[
        Path | None, Parameter(name="--dir", help="On the disk to measure; emptied afterwards.")
    ] = None,
    docs: Annotated[bool, Parameter(help="Write the page of the documentation too.")] = False,
) -> int:
    """Measure, and write table, JSON and picture into build/peers.

    Needs Go and Java with Maven for the rivals; what is missing is named, and the rest measured.
    Exit 0 whatever was measured: machines differ. Exit 1 when nothing was.
    """
    if (
        min(rounds, seconds, warm_brokers, kills, backlog, minutes) <= 0
        or warm < 0
        or backlog % 1000
    ):
        raise CliError(
            "numbers must be more than 0, --backlog a multiple of 1,000", exit_code=ExitCode.USAGE
        )
    if docs and only:
        raise CliError("--docs wants the whole table, without --only", exit_code=ExitCode.USAGE)
    steps = plan(rounds, only)
    load_average = os.getloadavg()[0]
    if load_average > QUIET:
        note(f"load average {load_average:.1f}: something else runs, the figures are no figures")
    tools = await fetch(WORK / "tools", chains_of(steps), note)
    note(f"about {estimate_s(steps, seconds + warm, warm_brokers, kills) / 60:.0f} minutes")
    machine = Machine(
        cores=len(os.sched_getaffinity(0)),
        load_average=load_average,
        flush_ms=flush_ms(),
        rounds=rounds,
        seconds=seconds,
        warm_s=warm,
        kills=kills,
        backlog=backlog,
    )
    deadline_s = trio.current_time() + 60 * minutes
    settings = Settings(seconds, warm, warm_brokers, kills, backlog, folder, deadline_s)
    WORK.mkdir(parents=True, exist_ok=True)

    def save(measured: Sequence[Measured]) -> None:
        (WORK / "peers.json").write_bytes(as_json(report_of(machine, measured)))

    report = report_of(machine, await play(steps, tools, settings, note, save))
    text = as_markdown(report)
    (WORK / "peers.md").write_text(text)
    draw(report, WORK / "peers.png")
    if docs:
        into_page(text)
    sys.stdout.write(text)
    return ExitCode.OK if any(row.rounds for row in report.rows) else ExitCode.FAILED


def into_page(text: str) -> None:
    """Write the table into the page of the documentation, picture and JSON beside it."""
    page = f"{text}\n![The table as bars](peers/peers.png)\n"
    PAGE.write_text(spliced(PAGE.read_text(), page))
    BESIDE_PAGE.mkdir(exist_ok=True)
    for name in ("peers.json", "peers.png"):
        shutil.copy(WORK / name, BESIDE_PAGE / name)


if __name__ == "__main__":
    # As Ctrl-C: brokers are ended and their folders removed.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(run_app(app, sys.argv[1:]))
