"""`dledger check`: one answer, one exit status, and what makes it *unknown*."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest

from dledger.cli.main import main
from jepsen_like.checkers import queue_log
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.history.parquet import ingest
from jepsen_like.history.sequence import encode_history
from jepsen_like.plans.plan import Plan, encode_plan
from spark_jobs.checks.everything import Settings, check_source
from spark_jobs.engines.local import LocalSource
from spark_jobs.generate.history import Shape, generate
from spark_jobs.run import NO_END
from tests.harness.clean_histories import clean_history


def check(capsys: pytest.CaptureFixture[str], run: Path) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(run), "--output", "json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, told


def run_of(folder: Path, seed: int) -> Path:
    (folder / "history").mkdir(parents=True)
    (folder / "history" / "runner.cbor").write_bytes(encode_history(clean_history(seed)))
    return folder


def test_a_clean_history_is_valid_and_exits_with_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generate(Shape(4_000, queues=2), tmp_path)
    code, told = check(capsys, tmp_path)
    assert (code, told["verdict"], told["anomalies"]) == (0, "valid", [])
    assert told["operations"] == 4_000
    assert told["seconds"] > 0
    assert len(told["digest"]) == 64


@pytest.mark.parametrize("kind", ["stale-read", "offset-committed-twice"])
def test_an_anomaly_is_invalid_exits_with_1_and_names_its_witnesses(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = generate(Shape(9_000, queues=2, plant=kind), tmp_path)
    code, told = check(capsys, tmp_path)
    assert (code, told["verdict"]) == (1, "invalid")
    (anomaly,) = told["anomalies"]
    assert (anomaly["checker"], anomaly["name"]) == (made.checker, made.plant)
    assert set(anomaly["operations"]) == set(made.witnesses)
    assert anomaly["detail"]


def test_records_become_tables_when_they_are_asked_for_and_again_when_there_are_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", 5)
    code, told = check(capsys, run)
    assert (code, told["operations"]) == (0, len(clean_history(5).operations))
    more = run / "history" / "more.cbor"
    more.write_bytes(b"")
    made_ns = (run / "parquet" / "ingest.json").stat().st_mtime_ns
    more.write_bytes(cbor2.dumps("no row"))
    assert more.stat().st_mtime_ns >= made_ns
    code, told = check(capsys, run)
    assert (code, told["verdict"]) == (2, "unknown")
    assert "1 records of the history could not be read" in told["reason"]


def test_a_torn_last_record_does_not_spoil_the_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", 5)
    (run / "history" / "more.cbor").write_bytes(cbor2.dumps(["a", "longer", "row"])[:-2])
    assert check(capsys, run)[0] == 0


def test_a_run_that_did_not_end_is_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", 5)
    (run / "plan.json").write_text(encode_plan(Plan(seed=1, duration_ms=1000, members=3)))
    code, told = check(capsys, run)
    assert (code, told["verdict"]) == (2, "unknown")
    assert NO_END in told["reason"]
    broken = Verdict("liveness", "invalid")
    (run / "result.json").write_text(json.dumps({"verdicts": [{**told["verdicts"][0]}]}))
    assert check(capsys, run)[1]["verdict"] in ("valid", "unknown")
    (run / "result.json").write_text(
        json.dumps({"verdicts": [{"checker": broken.checker, "validity": broken.validity}]})
    )
    code, told = check(capsys, run)
    assert (code, told["verdict"]) == (1, "invalid")


def test_what_is_no_run_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_check_that_wants_more_rows_than_fit_is_unknown_and_says_so(tmp_path: Path) -> None:
    ingest(run_of(tmp_path / "run", 5))
    source = LocalSource(tmp_path / "run" / "parquet")
    verdicts = check_source(source, Settings(rows_max=10))
    assert {verdict.validity for verdict in verdicts} == {"unknown"}
    assert "more than 10 rows" in verdicts[0].reason
    assert queue_log.NAME in {verdict.checker for verdict in check_source(source)}
