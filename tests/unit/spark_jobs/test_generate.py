"""Generated histories: correct ones raise no alarm, a planted anomaly is found by its name."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.history.operation import NEVER, F, Outcome
from dledger.jepsen_like.history.parquet import read_summary
from dledger.spark_jobs.generate.history import (
    PLANTERS,
    CannotPlantError,
    Shape,
    generate,
    planter_named,
)
from tests.harness.fast_part import gate_part
from tests.harness.generated import generated
from tests.harness.shipped_files import ROOT

pytestmark = pytest.mark.slow

SHAPES = [
    Shape(3_000, clients=1, queues=1),
    Shape(3_000, clients=3, queues=5, block_ops=200),
    Shape(6_000, clients=50, queues=2, block_ops=500),
    Shape(2_500, clients=1_000, queues=3),
    Shape(7, clients=2, queues=7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_generated_history_is_valid_and_of_given_length(shape: Shape, tmp_path: Path) -> None:
    history, made = generated(shape, tmp_path)
    assert (len(history.operations), made.ops) == (shape.ops, shape.ops)
    assert {op.queue for op in history.operations} == set(range(shape.queues))
    found = [v for verdict in check_everything(history) for v in verdict.violations]
    assert not found, f"{shape}: {found[:3]}"


def test_generated_history_has_outcomes_overlaps_and_reads(tmp_path: Path) -> None:
    history, _ = generated(Shape(20_000, clients=10, queues=2), tmp_path)
    kinds = Counter((F(op.f), Outcome(op.outcome)) for op in history.operations)
    assert all(kinds[F.SEND, outcome] > 20 for outcome in Outcome)
    assert all(kinds[f, Outcome.OK] > 50 for f in (F.PULL, F.MAX_OFFSET, F.COMMIT))
    assert sum(len(op.values) for op in history.operations) > 20_000
    instants = [(op.call_ns, 1) for op in history.operations if op.queue == 0]
    instants += [(op.ret_ns, -1) for op in history.operations if op.queue == 0]
    open_now, most = 0, 0
    for _, step in sorted(instant for instant in instants if instant[0] != NEVER):
        open_now += step
        most = max(most, open_now)
    lost_calls = sum(op.ret_ns == NEVER for op in history.operations if op.queue == 0)
    assert 3 <= most - lost_calls <= 5 or most <= 5 + lost_calls


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_generated_client_ends_after_an_unknown_outcome(shape: Shape, tmp_path: Path) -> None:
    history, _ = generated(shape, tmp_path)
    free: dict[int, int] = {}
    for op in sorted(history.operations, key=lambda op: op.call_ns):
        assert op.call_ns > free.get(op.process, -1), op
        free[op.process] = op.ret_ns
    values = [op.value for op in history.operations if op.f == F.SEND]
    assert len(values) == len(set(values))


@pytest.mark.parametrize("kind", gate_part(PLANTERS, 4))
@pytest.mark.parametrize("seed", [1])
def test_generated_anomaly_found_by_name_with_witnesses(
    kind: str, seed: int, tmp_path: Path
) -> None:
    shape = Shape(8_000, clients=10, queues=2, seed=seed, plant=kind, block_ops=4_000)
    history, made = generated(shape, tmp_path)
    verdicts = check_everything(history)
    ours = [v for verdict in verdicts for v in verdict.violations if v.checker == made.checker]
    assert {v.name for v in ours} >= {kind}, f"{shape}: {ours}"
    if kind == queue_log.INCONSISTENT_OFFSETS:  # here a value that was never sent
        ours = [v for v in ours if v.name == kind]
    assert {v.name for v in ours} == {kind}, f"{shape}: {ours}"
    assert any(set(made.witnesses) <= set(v.operations) for v in ours), f"{shape}: {made}, {ours}"


def test_equal_seeds_give_equal_files_and_others_do_not(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        generate(Shape(4_000, seed=seed, plant="duplicate"), tmp_path / name)
    files = ("ops", "obs", "nodes", "events")
    held = {
        name: [(tmp_path / name / "parquet" / f"{file}.parquet").read_bytes() for file in files]
        for name in ("one", "again", "two")
    }
    assert held["one"] == held["again"]
    assert held["one"][0] != held["two"][0]


def test_the_counts_are_those_of_the_tables(tmp_path: Path) -> None:
    made = generate(Shape(5_000, queues=3, plant="phantom value"), tmp_path)
    reported = read_summary(tmp_path / "parquet")
    rows = {
        name: pq.ParquetFile(tmp_path / "parquet" / f"{name}.parquet").metadata.num_rows
        for name in ("ops", "obs")
    }
    assert rows == {"ops": made.ops, "obs": made.obs} == {"ops": reported.ops, "obs": reported.obs}
    assert reported.records == reported.ops + reported.reads


def test_what_cannot_be_made_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CannotPlantError, match="stale-read"):
        planter_named("stale bread")
    with pytest.raises(CannotPlantError, match="generate more --ops"):
        generate(Shape(20, plant="non-monotonic read", queues=1), tmp_path)
    with pytest.raises(ConfigError, match="one at least"):
        generate(Shape(0), tmp_path)


PEAK = """
import resource, sys
from pathlib import Path
from dledger.spark_jobs.generate.history import Shape, generate
generate(Shape(int(sys.argv[1]), queues=1, block_ops=1 << 17), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.hunt
def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    peaks_mib = [
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(ops), str(tmp_path / str(ops))],
                check=True,
                capture_output=True,
                text=True,
                cwd=ROOT,
            ).stdout
        )
        for ops in (500_000, 4_000_000)
    ]
    assert peaks_mib[1] < peaks_mib[0] * 1.3 + 30, f"{peaks_mib} MiB"
