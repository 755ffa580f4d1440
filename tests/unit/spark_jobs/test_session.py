"""Spark as commands use it: its session, lines about its tasks, the bench."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.jepsen_like.checkers.kernel.facts import OBS_COLUMNS, OPS_COLUMNS
from dledger.spark_jobs.commands.bench import in_memory, running_cpu_s
from dledger.spark_jobs.commands.progress import task_line, task_lines

pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")

from dledger.spark_jobs.engines.session import NoJavaError, open_session, why_no_java


def java_that_says(folder: Path, text: str) -> str:
    """Return a JAVA_HOME whose java prints *text*."""
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    java.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ('openjdk version "11.0.2" 2019-01-15', "Java 11 is here and Spark needs 17"),
        ("nonsense", "no Java runtime is here"),
    ],
)
def test_java_found_or_the_package_to_install_is_named(
    text: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path / "java", text))
    why = why_no_java()
    assert (why is None) == (says is None), why
    if says is not None:
        assert why is not None
        assert says in why
        with pytest.raises(
            NoJavaError, match="openjdk-17-jre-headless; or check with --engine local"
        ):
            open_session()


WITHIN_S = 30.0


@dataclass
class Running:
    """A stage that runs."""

    numTasks: int  # noqa: N815  # Spark's name
    numCompletedTasks: int  # noqa: N815  # Spark's name


@dataclass
class Tracker:
    """The output of Spark."""

    stages: dict[int, Running | None] = field(default_factory=dict)

    def getActiveStageIds(self) -> list[int]:  # noqa: N802  # Spark's name
        return list(self.stages)

    def getStageInfo(self, stageId: int) -> Running | None:  # noqa: N802, N803  # Spark's names
        return self.stages[stageId]


def test_tasks_of_all_stages_that_run_are_one_sum() -> None:
    tracker = Tracker({3: Running(1_000, 20), 4: Running(200, 7), 5: None})
    assert task_line(tracker, 12.4, {}) == "12 s: 27 of 1,200 tasks of this step are done"
    assert task_line(Tracker(), 2.0, {}) == "2 s: Spark plans, or reads what was found"


def test_a_line_estimates_what_is_left_of_the_step() -> None:
    began_s: dict[int, float] = {}
    task_line(Tracker({3: Running(1_000, 0)}), 12.0, began_s)
    line = task_line(Tracker({3: Running(1_000, 250)}), 42.0, began_s)
    assert line == "42 s: 250 of 1,000 tasks of this step are done, about 90 s left"
    assert "left" not in task_line(Tracker({4: Running(8, 1)}), 50.0, began_s)


def test_lines_come_until_the_work_is_over() -> None:
    said: list[str] = []
    more = threading.Condition()

    def tell(line: str) -> None:
        with more:
            said.append(line.partition(": ")[2])
            more.notify_all()

    def wait_for(line: str) -> None:
        with more:
            assert more.wait_for(lambda: line in said, WITHIN_S), said

    with task_lines(tell, every_s=0.01) as on_spark:
        wait_for("Spark starts")
        on_spark(Tracker({1: Running(4, 1)}))
        wait_for("1 of 4 tasks of this step are done")
    count = len(said)
    assert all(thread.name != "task lines" for thread in threading.enumerate())
    assert len(said) == count


def test_progress_of_a_short_task_prints_nothing() -> None:
    said: list[str] = []
    with task_lines(said.append) as on_spark:
        on_spark(Tracker({1: Running(4, 1)}))
    assert said == []


def test_rows_in_memory_have_every_column_of_the_kernel() -> None:
    rows, looks = in_memory(2_000, 10)
    assert all(set(OPS_COLUMNS) <= set(block) for block in rows)
    assert all(set(OBS_COLUMNS) <= set(block) for block in looks)
    assert sum(len(block["op_id"]) for block in rows) == 2_000


@pytest.mark.slow
def test_bench_prints_a_figure_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ops", "3000,6000", "--kernel-ops", "2000", "--output", "json"]
    assert main(["history", "bench", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [figure["ops"] for figure in figures] == [2_000, 2_000, 3_000, 6_000]
    assert [figure["what"] for figure in figures[2:]] == ["Parquet to verdict, 4 queues"] * 2


def test_running_processes_are_counted_with_their_own() -> None:
    used = "import time\nwhile time.process_time() < 0.3: pass\n"
    running = f"{used}\nprint(flush=True)\nimport sys; sys.stdin.read()"
    parent = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {used!r}], check=True)
{used}
with subprocess.Popen([sys.executable, "-c", {running!r}]) as child:
    sys.exit(child.wait())
"""
    before_s = running_cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        used_s = running_cpu_s() - before_s
    assert used_s >= 0.85, "its own, that of the one it has ended, that of the one that runs"
