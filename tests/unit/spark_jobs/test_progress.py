"""What a command prints while Spark works."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from dledger.spark_jobs.commands.progress import task_line, task_lines

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
