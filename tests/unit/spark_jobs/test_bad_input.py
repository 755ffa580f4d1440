"""Bad input is no verdict: *unknown*, a sentence with the file and what to do, exit status 2."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import cbor2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dledger.cli.main import main
from dledger.jepsen_like.history.operation import (
    NEVER,
    F,
    Operation,
    Outcome,
    RunHeader,
    encode_row,
)
from dledger.jepsen_like.plans.plan import PLAN_VERSION, Plan, encode_plan
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import judge_run
from tests.harness.bad_tables import BAD, rewrite
from tests.harness.extent import examples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    generate(Shape(3_000, clients=8, queues=2), folder)
    return folder / "parquet"


def copied(whole: Path, into: Path) -> Path:
    shutil.copytree(whole, into / "parquet")
    return into / "parquet"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *arguments, "--output", "json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_unknown_and_the_sentence_names_the_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = copied(whole, tmp_path)
    file = BAD[name](folder)
    code, answer = asked(capsys, str(folder))
    assert (code, answer["verdict"], answer["anomalies"]) == (2, "unknown", [])
    assert str(folder / file) in answer["reason"]
    assert "again" in answer["reason"] or "version" in answer["reason"]
    assert "\n" not in answer["reason"]


def test_a_plan_of_a_newer_format_is_unknown(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(whole, tmp_path)
    plan = json.loads(encode_plan(Plan(1, 1_000)))
    for text in (json.dumps({**plan, "version": PLAN_VERSION + 1}), "no plan", "[]", ""):
        (tmp_path / "plan.json").write_text(text)
        code, answer = asked(capsys, str(tmp_path))
        assert (code, answer["verdict"]) == (2, "unknown")
        assert str(tmp_path / "plan.json") in answer["reason"]


@pytest.mark.parametrize("text", ['{"verdicts": 5}', "[]", "{", '{"extras": 5}'])
def test_a_damaged_result_is_unknown(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    copied(whole, tmp_path)
    (tmp_path / "plan.json").write_text(encode_plan(Plan(1, 1_000)))
    (tmp_path / "result.json").write_text(text)
    code, answer = asked(capsys, str(tmp_path))
    assert (code, answer["verdict"]) == (2, "unknown")
    assert str(tmp_path / "result.json") in answer["reason"]


def newer(op_id: int, **fields: int) -> bytes:
    op = Operation(op_id, op_id, 1, 0, F.SEND, Outcome.OK, 10, 20, "t", 0)
    for name, number in fields.items():
        setattr(op, name, number)
    return encode_row(op)


@pytest.mark.parametrize("record", [newer(1, f=99), newer(1, ret_ns=5), cbor2.dumps("no row")])
def test_a_run_that_is_followed_with_a_bad_record_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: bytes
) -> None:
    history = tmp_path / "history"
    history.mkdir()
    (history / "runner.cbor").write_bytes(newer(0, off=0) + record + newer(2, ret_ns=NEVER))
    (tmp_path / "result.json").write_text("{}")
    code, answer = asked(capsys, str(tmp_path), "--follow")
    assert (code, answer["verdict"]) == (2, "unknown")
    assert str(history / "runner.cbor") in answer["reason"]
    code, answer = asked(capsys, str(tmp_path))
    assert (code, answer["verdict"]) == (2, "unknown")
    assert "could not be read" in answer["reason"]


def test_files_of_two_runs_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history"
    history.mkdir()
    for run in ("first", "second"):
        data = encode_row(RunHeader(run)) + newer(0, off=0)
        (history / f"{run}.cbor").write_bytes(data)
    (tmp_path / "result.json").write_text("{}")
    for more in ((), ("--follow",)):
        code, answer = asked(capsys, str(tmp_path), *more)
        assert (code, answer["verdict"]) == (2, "unknown")
        assert "files of two runs, first and second" in answer["reason"]


def mutated(folder: Path, seed: int) -> None:
    """Damage one table: its bytes, or its rows."""
    rng = random.Random(seed)
    path = folder / f"{rng.choice(['ops', 'obs', 'nodes', 'events'])}.parquet"
    data = bytearray(path.read_bytes())
    how = rng.randrange(5)
    if how == 0:
        del data[rng.randrange(len(data)) :]
    elif how == 1:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:
        at = rng.randrange(len(data))
        data[at : at + rng.randint(1, 64)] = bytes(rng.randint(1, 64))
    else:
        table = pq.read_table(path)
        lost = {rng.randrange(table.num_rows) for _ in range(3)} if table.num_rows else set()
        kept = [row for row in range(table.num_rows) if row not in lost]
        if how == 3 and lost:
            rewrite(path, lambda table: table.take(pa.array(kept, pa.int64())))
        else:
            rewrite(path, lambda table: table.drop_columns([rng.choice(table.column_names)]))
        return
    path.write_bytes(bytes(data))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30))
@example(seed=110_399)  # a word that its dictionary does not have
def test_mutated_tables_never_lose_rows_silently(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = copied(whole, tmp_path_factory.mktemp("mutated"))
    mutated(folder, seed)
    outcome = judge_run(folder, "local", lambda: 0.0)
    if outcome.verdict == "valid":
        expected = judge_run(whole, "local", lambda: 0.0)
        assert outcome.digest == expected.digest, f"mutated(folder, {seed})"
    else:
        assert outcome.verdict == "unknown", f"mutated(folder, {seed}): {outcome.reason}"
        assert outcome.reason
    shutil.rmtree(folder.parent)


def test_a_flipped_bit_of_any_footer_is_unknown(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    rng = random.Random(7)
    for table in ("ops", "obs", "nodes", "events"):
        path = folder / f"{table}.parquet"
        data = path.read_bytes()
        size = int.from_bytes(data[-8:-4], "little") + 8
        for _ in range(40):
            at = len(data) - 1 - rng.randrange(size)
            flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
            path.write_bytes(data[:at] + flipped + data[at + 1 :])
            outcome = judge_run(folder, "local", lambda: 0.0)
            assert outcome.verdict == "unknown", (table, len(data) - at)
            assert f"{path} has a damaged footer" in outcome.reason
        path.write_bytes(data)
    assert judge_run(folder, "local", lambda: 0.0).verdict == "valid"
