"""`dledger check`: one answer, one exit status, and what makes it *unknown*."""

import json
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

from dledger.cli.main import main
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.checkers import delayed, push_group, queue_log, transactions
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.push_group import (
    Consumed,
    PushRecord,
    check_record,
    encode_record,
)
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import (
    NOTHING,
    PUSH_RECORD,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
    encode_history,
)
from dledger.jepsen_like.history.parquet import FOLDER, ingest
from dledger.jepsen_like.plans.plan import Plan, Workload, encode_plan
from dledger.jepsen_like.plans.plan import Settings as Configured
from dledger.jepsen_like.plans.promised import CHECKS_MAX, promised
from dledger.jepsen_like.report.run_folder import NO_END
from dledger.spark_jobs.engines.local import LocalSource
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import judge_run, settings_of
from tests.harness.clean_histories import clean_history
from tests.harness.rows import row

pytestmark = pytest.mark.slow


def check(capsys: pytest.CaptureFixture[str], run: Path) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(run), "--output", "json"])
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, reported


def run_of(folder: Path, seed: int) -> Path:
    (folder / "history").mkdir(parents=True)
    (folder / "history" / "runner.cbor").write_bytes(encode_history(clean_history(seed)))
    return folder


def test_a_clean_history_is_valid_and_exits_with_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generate(Shape(4_000, queues=2), tmp_path)
    code, reported = check(capsys, tmp_path)
    assert (code, reported["verdict"], reported["anomalies"]) == (0, "valid", [])
    assert reported["operations"] == 4_000
    assert reported["seconds"] > 0
    assert len(reported["digest"]) == 64


@pytest.mark.parametrize("kind", ["stale-read", "offset-read-before-its-commit"])
def test_check_anomaly_exits_1_and_names_witnesses(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = generate(Shape(9_000, queues=2, plant=kind), tmp_path)
    code, reported = check(capsys, tmp_path)
    assert (code, reported["verdict"]) == (1, "invalid")
    (anomaly,) = reported["anomalies"]
    assert (anomaly["checker"], anomaly["name"]) == (made.checker, made.plant)
    assert set(anomaly["operations"]) == set(made.witnesses)
    assert anomaly["detail"]


def test_records_become_tables_again_when_there_are_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", 5)
    code, reported = check(capsys, run)
    assert (code, reported["operations"]) == (0, len(clean_history(5).operations))
    more = run / "history" / "more.cbor"
    more.write_bytes(b"")
    made_ns = (run / "parquet" / "ingest.json").stat().st_mtime_ns
    more.write_bytes(cbor2.dumps("no row"))
    assert more.stat().st_mtime_ns >= made_ns
    code, reported = check(capsys, run)
    assert (code, reported["verdict"]) == (2, "unknown")
    assert "1 records of the history could not be read" in reported["reason"]


def test_torn_last_record_does_not_change_the_verdict(
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
    code, reported = check(capsys, run)
    assert (code, reported["verdict"]) == (2, "unknown")
    assert NO_END in reported["reason"]
    broken = Verdict("liveness", "invalid")
    (run / "result.json").write_text(json.dumps({"verdicts": [{**reported["verdicts"][0]}]}))
    assert check(capsys, run)[1]["verdict"] in ("valid", "unknown")
    (run / "result.json").write_text(
        json.dumps({"verdicts": [{"checker": broken.checker, "validity": broken.validity}]})
    )
    code, reported = check(capsys, run)
    assert (code, reported["verdict"]) == (1, "invalid")


def test_what_is_no_run_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_file_address_is_judged_like_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ingest(run_of(tmp_path / "run", 5))
    code, by_path = check(capsys, tmp_path / "run")
    assert main(["check", (tmp_path / "run").as_uri(), "--output", "json"]) == code == 0
    by_address = json.loads(capsys.readouterr().out)
    assert by_address["digest"] == by_path["digest"]
    assert by_address["operations"] == by_path["operations"] > 0
    assert main(["check", (tmp_path / "nothing").as_uri(), "--output", "json"]) == 2
    (tmp_path / "run").rename(tmp_path / "a run, 5 %20")
    for address in ((tmp_path / "a run, 5 %20").as_uri(), f"file://{tmp_path}/a run, 5 %20"):
        capsys.readouterr()
        assert main(["check", address, "--output", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["digest"] == by_path["digest"]


def test_what_is_no_verdict_never_exits_as_invalid(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "y" * 5_000, "--output", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "unknown"
    ingest(run_of(tmp_path / "run", 5))

    def ends(*_: object, **__: object) -> None:
        raise MQError("the tables went away")

    monkeypatch.setattr("dledger.spark_jobs.commands.check.judge_run", ends)
    code, answer = check(capsys, tmp_path / "run")
    assert (code, answer["verdict"], answer["reason"]) == (2, "unknown", "the tables went away")


def test_check_over_the_row_limit_is_unknown(tmp_path: Path) -> None:
    ingest(run_of(tmp_path / "run", 5))
    source = LocalSource(tmp_path / "run" / "parquet")
    verdicts = check_source(source, Settings(rows_max=10))
    assert {verdict.validity for verdict in verdicts} == {"unknown"}
    assert "more than 10 rows" in verdicts[0].reason
    assert queue_log.NAME in {verdict.checker for verdict in check_source(source)}


# -- what a run guarantees, from its folder ----------------------------------------------------

TRANSACTIONS = Workload(transactions_per_mille=500, idempotent=True)
PLAN = Plan(1, 1_000, workload=TRANSACTIONS, settings=Configured(lock_lease_ms=7_000))


def asked_too_often(plan: str) -> History:
    """A half message that is asked for once more than the runner's brokers may ask."""
    history = History(RunHeader("r", 1, plan))
    for op_id in range(CHECKS_MAX + 2):
        f = F.CHECK if op_id else F.HALF
        op = Operation(op_id, op_id, 1, NOTHING, f, Outcome.OK, op_id * 10, op_id * 10, "orders", 0)
        op.value, op.txn = 5, 0
        history.operations.append(op)
    return history


def found_in(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    verdicts = judge_run(folder, "local", lambda: 0.0).verdicts
    return [(v.name, v.operations) for verdict in verdicts for v in verdict.violations]


def test_check_applies_the_guarantees_of_the_plan(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    folder.mkdir()
    history = asked_too_often(encode_plan(PLAN))
    (folder / "runner.cbor").write_bytes(encode_history(history))
    expected = [
        (v.name, v.operations)
        for verdict in check_everything(history, promised(PLAN, settled=False))
        for v in verdict.violations
    ]
    assert expected == [(transactions.CHECKED_OFTEN, (0, CHECKS_MAX + 1))]
    (tmp_path / "plan.json").write_text(encode_plan(PLAN))
    assert found_in(tmp_path) == expected
    (tmp_path / "plan.json").unlink()
    assert found_in(tmp_path) == expected, "the history begins with the plan"
    assert found_in(tmp_path / FOLDER) == expected, "and tables alone say it, too"


def test_check_of_foreign_brokers_uses_their_settings(tmp_path: Path) -> None:
    own = settings_of(tmp_path, PLAN)
    assert (own.lease_ns, own.checks_max, own.idempotent) == (7 * 10**9, CHECKS_MAX, True)
    (tmp_path / "result.json").write_text(json.dumps({"extras": {"namesrv": "h:9876"}}))
    theirs = settings_of(tmp_path, PLAN)
    assert (theirs.checks_max, theirs.idempotent) == (transactions.CHECKS_MAX, True)
    assert theirs.lease_ns == Settings().lease_ns
    assert settings_of(tmp_path, None) == Settings()
    assert [settings_of(tmp_path, plan, 5).late_max_ns for plan in (PLAN, None)] == [5, 5]


def test_how_late_a_message_may_come_is_judged_where_it_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "history").mkdir()
    rows = [
        row(0, F.SEND, 0, 10, topic="orders", value=5, due_ns=20),
        row(1, F.MAX_OFFSET, 40, 50, topic="orders", max_off=0),
    ]
    held = ReplicaRead(99, "n0", "orders", 0, 0, (5,))
    history = History(RunHeader("r"), rows, replica_reads=[held])
    (tmp_path / "history" / "runner.cbor").write_bytes(encode_history(history))
    expected = delayed.check_history(history, late_max_ns=0).violations
    assert {violation.name for violation in expected} == {delayed.LATE}
    for option, count in (([], 0), (["--late-max-ms", "0"], len(expected))):
        main(["check", str(tmp_path), "--output", "json", *option])
        reported = json.loads(capsys.readouterr().out)
        late = [one for one in reported["anomalies"] if one["name"] == delayed.LATE]
        assert len(late) == count
    assert [tuple(one["operations"]) for one in late] == [v.operations for v in expected]


def test_a_push_group_is_judged_again_from_its_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", 5)
    record = PushRecord(
        consumed=[Consumed("m0", 0, 0, 10, 1), Consumed("m1", NOTHING, 3, 11, 2)],
        stored={0: (0, (10, 11, 12))},
        owners={"m0": frozenset({0}), "m1": frozenset()},
        committed={0: 3},
        counts={"m0 start 1": (1, 1)},
        is_orderly=True,
    )
    (run / "history" / PUSH_RECORD).write_bytes(encode_record(record))
    expected = check_record(record)
    assert [violation.name for violation in expected.violations] == [push_group.LOST]
    for folder in (run, run / FOLDER):
        code, reported = check(capsys, folder)
        (found,) = [v for v in reported["verdicts"] if v["checker"] == push_group.NAME]
        assert msgspec.convert(found, type=Verdict) == expected
        assert (code, reported["verdict"]) == (1, "invalid")
    (run / "history" / PUSH_RECORD).write_bytes(b"no record")
    code, reported = check(capsys, run)
    assert (code, reported["verdict"]) == (2, "unknown")
