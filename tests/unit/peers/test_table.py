"""The table of the measurement beside the rivals: markdown, JSON and the page of the docs."""

from __future__ import annotations

import msgspec
import pytest

from dledger.output import CliError
from tests.harness.shipped_files import ROOT
from tests.peers.figures import Measured
from tests.peers.picture import draw
from tests.peers.plan import CONTENDERS, plan
from tests.peers.table import (
    BEGIN,
    END,
    HEAD,
    Machine,
    Report,
    as_json,
    as_markdown,
    report_of,
    spliced,
)

MACHINE = Machine(
    cores=2,
    load_average=0.04,
    flush_ms=0.091,
    rounds=1,
    seconds=5.0,
    warm_s=2.0,
    kills=10,
    backlog=100_000,
)

MEASURED = [
    Measured(
        contender="nats",
        case="64",
        round=0,
        rate=23_456.7,
        p50_ms=2.514,
        p99_ms=12.34,
        p999_ms=123.4,
        messages=117_000,
        failed=0,
        broker_cpu_s=41.07,
        client_cpu_s=4.999,
        rss_mib=153.4,
    ),
    Measured(contender="rocketmq", case="64", round=0, error="a | b\nc"),
    Measured(contender="ours", case="kill", round=0, gaps_ms=(150.0, 250.0, 1350.0), rss_mib=300.0),
    Measured(contender="ours", case="drain", round=0, rate=1e6, messages=1, rss_mib=1.0),
]


def cells(text: str, key: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if f"--only {key}" in line]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_table_has_a_row_with_its_figures() -> None:
    assert cells(as_markdown(report_of(MACHINE, MEASURED)), "nats/64") == [
        *("NATS 2.15.2 R3", "64 outstanding", "page cache of a majority", "23,457"),
        *("2.51", "12.3", "123", "41.1", "5.00", "153", "0"),
        '`make bench-peers PEERS="--only nats/64"`',
    ]


def test_table_states_why_a_row_has_no_figures() -> None:
    row = cells(as_markdown(report_of(MACHINE, MEASURED)), "rocketmq/64")
    assert row[3] == "failed: a / b c"
    assert row[4:11] == ["-"] * 7


def test_table_of_kills_has_times_and_their_number() -> None:
    row = cells(as_markdown(report_of(MACHINE, MEASURED)), "ours/kill")
    assert row[1] == "kill of the leader → next ack, 3 kills"
    assert row[3:7] == ["-", "250", "1,350", "1,350"]


def test_table_names_what_reading_waits_for() -> None:
    text = as_markdown(report_of(MACHINE, MEASURED))
    assert cells(text, "ours/drain")[2] == "nothing: reads"
    assert cells(text, "ours/kill")[2] == "flush on a majority"


def test_table_has_as_many_cells_in_every_row() -> None:
    measured = [
        Measured(contender=step.contender.key, case=case, round=0, rate=1.0, p50_ms=1.0)
        for step in plan(1, ())
        for case in step.cases
    ]
    text = as_markdown(report_of(MACHINE, measured))
    table = [line for line in text.split("\n\n")[1].splitlines() if line]
    assert len(table) == 2 + sum(len(contender.cases) for contender in CONTENDERS)
    assert {line.count(" | ") for line in table} == {len(HEAD) - 1}


def test_table_states_the_machine_and_every_target() -> None:
    text = as_markdown(report_of(MACHINE, MEASURED))
    assert text.startswith(
        "2 cores, one flush of 400 bytes 0.09 ms, load average before the run 0.04"
    )
    assert "| kill of the leader → next ack, p50 of 3 kills | ≤ 0.2 s | 0.25 s | **no** |" in text
    assert "| drain: rate against NATS | ≥ 2 times | not measured | - |" in text
    fast = [Measured(contender="ours", case="kill", round=0, gaps_ms=(100.0,))]
    assert "| ≤ 0.2 s | 0.10 s | yes |" in as_markdown(report_of(MACHINE, fast))


def test_json_holds_every_round() -> None:
    report = report_of(MACHINE, MEASURED)
    assert msgspec.json.decode(as_json(report), type=Report) == report
    assert report.measured == MEASURED


def test_page_keeps_what_is_around_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = spliced(page, "new\n")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert spliced(once, "new\n") == once


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(CliError, match="the page lacks"):
        spliced(page, "new\n")


def test_the_page_of_the_docs_has_its_marks() -> None:
    page = (ROOT / "docs" / "operate" / "performance.md").read_text()
    assert spliced(page, "new\n").count("new\n") == 1


def test_picture_is_drawn_from_any_rows(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    for number, measured in enumerate(([], MEASURED)):
        draw(report_of(MACHINE, measured), folder / f"{number}.png")
        assert (folder / f"{number}.png").read_bytes().startswith(b"\x89PNG")
