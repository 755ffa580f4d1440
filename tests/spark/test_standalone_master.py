"""A master, a worker and a driver in processes of their own judge as one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import judge_run
from tests.harness.eventually import eventually
from tests.harness.java import need_java
from tests.harness.shipped_files import ROOT

pytestmark = pytest.mark.slow

DEPLOY = "org.apache.spark.deploy"
WITHIN_S = 240.0
"""Two JVMs start, on a machine that other tests use."""
JUDGE = """
import sys
from dledger.spark_jobs.run import judge_run
for folder in sys.argv[2:]:
    outcome = judge_run(folder, "spark", lambda: 0.0, master=sys.argv[1])
    print("judged", outcome.verdict, outcome.digest, outcome.reason)
"""


def environment() -> dict[str, str]:
    more = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **more, "PYSPARK_PYTHON": sys.executable}


@contextmanager
def daemon(log: Path, ready: str, *arguments: str) -> Iterator[str]:
    """Run a daemon of Spark's; yield what *ready* finds in its log."""
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )

    async def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-2_000:]
        return re.search(ready, log.read_text()) is not None

    try:
        trio.run(partial(eventually, f"{ready} in {log}", is_ready, WITHIN_S))
        found = re.search(ready, log.read_text())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.hunt
def test_a_standalone_master_judges_a_good_and_a_broken_history(tmp_path: Path) -> None:
    need_java()
    folders = [tmp_path / "good", tmp_path / "broken"]
    for folder, plant in zip(folders, ("", "stale-read"), strict=True):
        generate(Shape(20_000, clients=20, queues=3, plant=plant), folder)
    local = [judge_run(folder, "local", lambda: 0.0) for folder in folders]
    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as running:
        master = running.enter_context(
            daemon(
                tmp_path / "master", r"spark://127\.0\.0\.1:\d+", f"{DEPLOY}.master.Master", *here
            )
        )
        size = ("--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work"))
        worker = (f"{DEPLOY}.worker.Worker", *here, *size, master)
        running.enter_context(daemon(tmp_path / "worker", "Successfully registered", *worker))
        done = subprocess.run(
            [sys.executable, "-c", JUDGE, master, *map(str, folders)],
            check=False,
            capture_output=True,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr[-2_000:]
    found = re.findall(r"^judged (\w+) (\w+)", done.stdout, re.MULTILINE)
    assert found == [(outcome.verdict, outcome.digest) for outcome in local], done.stdout
    assert [verdict for verdict, _ in found] == ["valid", "invalid"]
    executors = list((tmp_path / "work").glob("app-*/*"))
    assert executors, "no executor of the worker did anything"
