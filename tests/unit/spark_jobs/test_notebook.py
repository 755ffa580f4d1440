"""The notebook is that of its source, and the runs it ships are what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.notebooks.build import NOTEBOOK, SOURCE, notebook_of, text_of
from spark_jobs.notebooks.pictures import MORE, PICTURE, SHIPPED, Looked
from spark_jobs.run import judge_run


def test_the_notebook_is_generated_from_its_source() -> None:
    assert NOTEBOOK.read_text() == text_of(notebook_of(SOURCE.read_text())), (
        "python -m spark_jobs.notebooks.build makes it again"
    )
    assert all(not cell.get("outputs") for cell in notebook_of(SOURCE.read_text()).cells)


def test_the_shipped_runs_are_small_one_good_and_one_broken() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 500_000
    good, broken = (judge_run(SHIPPED / name, "local", lambda: 0.0) for name in ("good", "broken"))
    assert good.verdict != "invalid"
    assert not good.anomalies
    assert broken.verdict == "invalid"
    assert "inconsistent offsets" in {anomaly["name"] for anomaly in broken.anomalies}


@pytest.mark.parametrize("name", ["good", "broken"])
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
        told = Looked(SHIPPED / name, tmp_path).bounds("orders", 0)
        crossed[name] = int((told.earliest > told.latest).sum())
    assert crossed["good"] == 0
    assert crossed["broken"] > 10


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
