"""`dledger check` and `dledger history export` with histories that Jepsen wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.main import main
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.notebooks.pictures import SHIPPED
from tests.harness.bad_tables import BAD as BAD_TABLES

GOOD = (
    "{:process 0, :type :invoke, :f :write, :value 1} {:process 0, :type :ok, :f :write, :value 1}"
)
BAD = f"{GOOD} {{:process 1, :type :ok, :f :read, :value 2}}"


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *arguments, "--output", "json"])
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, reported


@pytest.mark.parametrize(
    ("text", "status", "verdict"),
    [(GOOD, 0, "valid"), (BAD, 1, "invalid"), ("{:a", 2, "unknown"), ("", 2, "unknown")],
)
def test_the_exit_status_is_that_of_the_verdict(
    text: str, status: int, verdict: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "history.edn"
    path.write_text(text)
    code, reported = check(capsys, str(path))
    assert (code, reported["verdict"]) == (status, verdict)
    assert bool(reported["reason"]) == (verdict == "unknown")
    assert check(capsys, str(tmp_path))[1]["verdict"] == verdict  # the folder of a stored test
    assert len(reported["digest"]) == 64


def test_an_anomaly_names_its_rows_and_the_workload_may_be_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.edn"
    path.write_text(BAD)
    code, reported = check(capsys, str(path))
    (anomaly,) = reported["anomalies"]
    assert (anomaly["checker"], anomaly["name"]) == ("register", "nonlinearizable")
    assert anomaly["operations"] == [1, 2]
    code, reported = check(capsys, str(path), "--workload", "kafka")
    assert (code, reported["verdict"]) == (2, "unknown")


def test_a_file_that_is_not_there_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", str(tmp_path / "no.edn"), "--workload", "set"]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "bytes.edn").write_bytes(b"\xff\xfe")
    code, reported = check(capsys, str(tmp_path / "bytes.edn"))
    assert (code, reported["reason"]) == (2, "byte 0 of bytes.edn is no UTF-8")


@pytest.mark.parametrize(("run", "status"), [("good", 0), ("broken", 1)])
def test_an_exported_run_is_judged_like_the_run(
    run: str, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "history.edn"
    assert main(["history", "export", str(SHIPPED / run), "--out", str(out)]) == 0
    code, reported = check(capsys, str(out))
    assert code == status
    names = {anomaly["name"] for anomaly in reported["anomalies"]}
    assert names == ({"inconsistent-offsets"} if status else set())


def test_tables_that_are_not_whole_are_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "history.edn"
    for name in (
        "operations are lost",
        "an operation of another kind",
        "an offset before the first",
        "a page is damaged",
    ):
        folder = tmp_path / name
        shutil.copytree(SHIPPED / "good", folder)
        BAD_TABLES[name](folder)
        assert main(["history", "export", str(folder), "--out", str(out)]) == 1
        assert "again" in capsys.readouterr().err
        assert not out.exists()


def test_pulls_that_are_hashes_are_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generate(Shape(4_000, queues=2), tmp_path / "run")
    out = tmp_path / "history.edn"
    assert main(["history", "export", str(tmp_path / "run"), "--out", str(out)]) == 1
    assert "pulls are kept as a hash" in capsys.readouterr().err
    assert not out.exists()
