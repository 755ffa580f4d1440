"""The figures as markdown and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dledger.output import CliError
from tools.bench.figures import Measured, Row, Target, rows_of, targets
from tools.bench.loads import CASE
from tools.bench.plan import CONTENDER

BEGIN = "<!-- peers -->"
END = "<!-- end of peers -->"

HEAD = (
    *("brokers, client", "load", "an acknowledgement waits for", "messages/s"),
    *("p50 ms", "p99 ms", "p99.9 ms", "brokers' CPU s per 10⁶", "client's CPU s per 10⁶"),
    *("brokers' RSS MiB", "failed", "repeat with"),
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured.

    Attributes:
        load_average: Of the minute before: 0 on a quiet machine.
        flush_ms: One flush of 400 bytes, p50.
        seconds: Measured of each load, after `warm_s`.
    """

    cores: int
    load_average: float
    flush_ms: float
    rounds: int
    seconds: float
    warm_s: float
    kills: int
    backlog: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run has found: what the JSON file holds."""

    machine: Machine
    rows: list[Row]
    targets: list[Target]
    measured: list[Measured]


def report_of(machine: Machine, measured: Sequence[Measured]) -> Report:
    """Return the report of what was measured."""
    return Report(
        machine=machine,
        rows=rows_of(measured),
        targets=targets(measured),
        measured=list(measured),
    )


def as_json(report: Report) -> bytes:
    """Return the report as one indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def as_markdown(report: Report) -> str:
    """Return what was measured, the table and the targets."""
    machine = report.machine
    about = (
        f"{machine.cores} cores, one flush of 400 bytes {machine.flush_ms:.2f} ms, load average"
        f" before the run {machine.load_average:.2f}; medians of {machine.rounds} rounds in turn,"
        f" {machine.seconds:g} s each after {machine.warm_s:g} s; a backlog of"
        f" {machine.backlog:,} messages."
    )
    lines = [about, "", _line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_cells(row)) for row in report.rows]
    lines += ["", _line(("target", "aim", "measured", "met")), _line(["---"] * 4)]
    lines += [_line(_target_cells(target)) for target in report.targets]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    contender, case = CONTENDER[row.contender], CASE[row.case]
    repeat = f'`make bench-peers PEERS="--only {row.contender}/{row.case}"`'
    waits_for = "nothing: reads" if case.mode == "drain" else contender.waits_for
    first = [contender.title, case.about, waits_for]
    if not row.rounds:
        reason = row.errors[0].replace("|", "/").replace("\n", " ")
        return [*first, f"failed: {reason}", *["-"] * 7, repeat]
    times = [_number(value) for value in (row.p50_ms, row.p99_ms, row.p999_ms)]
    memory = f"{row.rss_mib:,.0f}"
    if row.kills:
        first[1] += f", {row.kills} {'kill' if row.kills == 1 else 'kills'}"
        return [*first, "-", *times, "-", "-", memory, _failed(row), repeat]
    costs = [_number(row.broker_cpu_s), _number(row.client_cpu_s)]
    return [*first, f"{row.rate:,.0f}", *times, *costs, memory, _failed(row), repeat]


def _failed(row: Row) -> str:
    rounds = f", {len(row.errors)} rounds: {row.errors[0]}" if row.errors else ""
    return f"{row.failed:,}{rounds}".replace("|", "/").replace("\n", " ")


def _number(value: float) -> str:
    """Return three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _target_cells(target: Target) -> list[str]:
    if target.measured is None:
        return [target.what, target.aim, "not measured", "-"]
    met = "yes" if target.met else "**no**"
    return [target.what, target.aim, f"{target.measured:.2f} {target.unit}", met]


def spliced(page: str, text: str) -> str:
    """Return *page* with *text* between its two marks.

    Raises:
        CliError: The page does not have both marks, once and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CliError(f"the page lacks {BEGIN} … {END}")
    return f"{before}{begin}\n{text}{end}{after}"
