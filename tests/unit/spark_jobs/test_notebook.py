"""The notebook is that of its source, and the runs it ships are as it describes them."""

import struct
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dledger.jepsen_like.checkers import steps
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.spark_jobs.notebooks.build import NOTEBOOK, SOURCE, notebook_of
from dledger.spark_jobs.notebooks.pictures import MORE, PICTURE, SHIPPED, Looked
from dledger.spark_jobs.notebooks.service_proofs import (
    draw_message,
    message_rows,
    output_rows,
    outs_of,
    step_rows,
)
from dledger.spark_jobs.run import judge_run
from tests.harness.fast_part import gate_part

read_notebook: Any = nbformat.read


def test_the_notebook_has_the_cells_of_its_source() -> None:
    stored, made = read_notebook(NOTEBOOK, 4), notebook_of(SOURCE.read_text())
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (stored, made)]
    assert cells[0] == cells[1], "python -m dledger.spark_jobs.notebooks.build makes it again"


def test_the_notebook_is_stored_with_its_outputs() -> None:
    stored = read_notebook(NOTEBOOK, 4)
    outputs = [output for cell in stored.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 17
    text = "".join(output.get("text", "") for output in outputs)
    assert "inconsistent offsets in orders/0: offset 118" in text
    assert "send          ok" in text
    assert "message handed out again before its time in receivers-in-order@orders/0" in text
    assert "two stored steps have messages in common" in text
    assert "spark invalid True" in text
    assert NOTEBOOK.stat().st_size < 600_000


def test_the_shipped_runs_are_small_one_good_and_one_broken() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 500_000
    good, broken = (judge_run(SHIPPED / name, "local", lambda: 0.0) for name in ("good", "broken"))
    assert good.verdict != "invalid"
    assert not good.anomalies
    assert broken.verdict == "invalid"
    assert "inconsistent offsets" in {anomaly["name"] for anomaly in broken.anomalies}


def only_violations(name: str) -> list[Violation]:
    verdicts = judge_run(SHIPPED / name, "local", lambda: 0.0).verdicts
    return [violation for verdict in verdicts for violation in verdict.violations]


def test_a_message_that_is_out_twice_has_its_proof(tmp_path: Path) -> None:
    (violation,) = only_violations("pop")
    run = Looked(SHIPPED / "pop", tmp_path)
    rows = message_rows(run, violation)
    assert [(row["what"], row["attempt"]) for row in rows] == [
        ("receive", 1), ("receive", 2), ("ack", ""),
    ]  # fmt: skip
    assert [row["operation"] for row in rows[:2]] == list(violation.operations)
    first, second = outs_of(run, violation)
    assert first.process != second.process
    assert first.begin_ns < second.known_ns < first.end_ns
    assert second.end_ns < first.end_ns, "the acknowledgement ends it"
    assert [row["what"] for row in run.happened_between(9.0, 10.0)] == ["kill"]
    assert draw_message(run, violation).read_bytes().startswith(b"\x89PNG")


def test_a_step_that_happened_twice_has_its_proof(tmp_path: Path) -> None:
    overlap = next(v for v in only_violations("steps") if v.name == steps.OVERLAP)
    run = Looked(SHIPPED / "steps", tmp_path)
    rows = step_rows(run, overlap)
    assert {(row["what"], row["ended"], row["began at"]) for row in rows} == {("step", "ok", 22)}
    outputs = output_rows(run, overlap)
    by_step: dict[int, list[str]] = {}
    for row in outputs:
        by_step.setdefault(row["of step"], []).append(row["message"])
    assert set(by_step) == set(overlap.operations)
    one, other = by_step.values()
    assert one == other == [f"orders/1 {off}" for off in (22, 23, 24)]
    assert len({row["output"] for row in outputs}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", gate_part(["broken", "good"], 1))
def test_every_picture_can_be_drawn_of_either_run(name: str, tmp_path: Path) -> None:
    run = Looked(SHIPPED / name, tmp_path / "pictures")
    for picture in (*PICTURE, *MORE):
        path = run.draw(picture)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000
    assert run.draw_bounds("orders", 0).is_file()


def test_bounds_cross_in_the_broken_run_alone(tmp_path: Path) -> None:
    crossed = {}
    for name in ("good", "broken"):
        reported = Looked(SHIPPED / name, tmp_path).bounds("orders", 0)
        crossed[name] = int((reported.earliest > reported.latest).sum())
    assert crossed["good"] == 0
    assert crossed["broken"] > 10


@pytest.mark.slow
def test_a_violation_has_its_surroundings(tmp_path: Path) -> None:
    run = Looked(SHIPPED / "broken", tmp_path)
    outcome = judge_run(SHIPPED / "broken", "local", lambda: 0.0)
    (violation, *_) = next(v for v in outcome.verdicts if v.checker == "queue_log").violations
    rows = run.witnesses(violation)
    assert [row["operation"] for row in rows] == list(violation.operations)
    topic, queue = violation.subject.rsplit("/", 1)
    assert run.held_at(topic, int(queue), rows[0]["offset"])
    assert run.happened_between(0, run.span.duration_s)
    assert run.happened_between(-2, -1) == []
    assert run.draw_order(violation).is_file()
    picture = run.draw_order(violation).read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 1430
    assert 500 < height < 900  # servers, clients, offsets, and nothing below the legend


def test_rows_have_names_and_events_their_ends(tmp_path: Path) -> None:
    run = Looked(SHIPPED / "broken", tmp_path)
    first = run.first_rows(4)
    assert [(row["what"], row["ended"]) for row in first] == [
        ("send", "ok"), ("send", "ok"), ("pull", "ok"), ("max_offset", "ok"),
    ]  # fmt: skip
    isolated = [row for row in run.happened_between(19.5, 19.6) if row["what"] == "isolate"]
    assert {(row["node"], row["at s"], row["until s"]) for row in isolated} == {
        ("n1", "19.581", "22.137")
    }
