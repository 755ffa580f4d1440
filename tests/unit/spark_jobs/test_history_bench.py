"""``dledger history bench`` measures what readers of Parquet hand over."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dledger.cli.main import main
from dledger.jepsen_like.checkers.kernel.facts import OBS_COLUMNS, OPS_COLUMNS
from dledger.spark_jobs.commands.bench import in_memory, running_cpu_s


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
