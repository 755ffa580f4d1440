"""A queue judged in chunks gets the report of the queue in one piece, whatever is wrong with it."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from dledger.jepsen_like.checkers.kernel.cut import report_of
from dledger.jepsen_like.checkers.kernel.facts import OBS_COLUMNS, OPS_COLUMNS, Columns
from dledger.jepsen_like.checkers.kernel.home import Home
from dledger.jepsen_like.checkers.kernel.judge import Judged
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas
from dledger.jepsen_like.checkers.kernel.tables import gather, table_to_numpy
from dledger.jepsen_like.checkers.run_rows import replicas_of
from dledger.jepsen_like.checkers.total_queue import DUPLICATED, FAILED_BUT_THERE, add_up
from dledger.jepsen_like.checkers.transactions import transactions_of
from dledger.jepsen_like.history.columns import obs_table, ops_table
from dledger.jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from dledger.spark_jobs.generate.history import planter_named
from dledger.spark_jobs.generate.queue_stream import Block, QueueStream
from tests.harness.clean_histories import clean_history
from tests.harness.cut_queues import judged_in_chunks
from tests.harness.fast_part import gate_part
from tests.harness.history_world import TOPIC as CLEAN_TOPIC
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_scene import InapplicableError, Scene
from tests.harness.queue_histories import TOPIC, random_history
from tests.property.test_queue_kernel import folded

pytestmark = pytest.mark.slow

ALONE = Replicas(("n0",), {("q", 0): ((0, 0),)}, 0)
RANDOM = 300
KINDS = [kind for kind in PLANTERS if kind[0] in ("queue_log", "total_queue", "replicas")]
HOT_OPS = 100_000
CHUNKS = (1, 7, 64)
HOT_PLANTS = (
    "", "stale read", "non-monotonic read", "send order inverted", "read from the future",
    "inconsistent offsets", "duplicate", "aborted read", "phantom value", "slot of no send",
    "read contradicts itself", "min offset went back", "acknowledged message lost",
)  # fmt: skip


def comparable(report: QueueReport) -> tuple[Judged, Home]:
    """Return a report in which bytes that are sets are in order."""
    home = report.home
    spares = sorted(zip(np.frombuffer(home.spare, np.int64), home.spare_outcome, strict=True))
    reported = {
        name: np.sort(np.frombuffer(getattr(home, name), np.int64)).tobytes()
        for name in ("away", "strange", "echo")
    }
    reported["spare"] = str(spares).encode()
    return report.judged, msgspec.structs.replace(home, spare_outcome=b"", **reported)


def tables(history: History, queue: Queue, replicas: Replicas) -> tuple[Columns, Columns]:
    rows = [op for op in history.operations if (op.topic, op.queue) == queue]
    pulls = [op for op in rows if op.f == F.PULL and op.outcome == Outcome.OK]
    reads = [r for r in history.replica_reads if (r.topic, r.queue) == queue]
    ops = table_to_numpy(ops_table("r", rows), OPS_COLUMNS)
    looks = obs_table("r", pulls, reads)
    obs = dict(table_to_numpy(looks, [name for name in OBS_COLUMNS if name != "replica"]))
    names = {name: number for number, name in enumerate(replicas.names)}
    reported = looks.column("replica").to_pylist()
    obs["replica"] = np.array([names.get(name, -1) for name in reported], dtype=np.int64)
    return ops, obs


def copied(ops: Columns, obs: Columns) -> tuple[list[Columns], list[Columns]]:
    return [{n: c.copy() for n, c in ops.items()}], [{n: c.copy() for n, c in obs.items()}]


@pytest.mark.parametrize("block", gate_part(range(4), 1))
def test_random_queues_in_chunks_get_the_report_of_one_piece(block: int) -> None:
    valid = {True: 0, False: 0}
    for seed in range(block * RANDOM, (block + 1) * RANDOM):
        operations = random_history(random.Random(seed), 9 if seed % 4 else 30)
        if seed % 3 == 0:
            operations = folded(operations, random.Random(seed))
        rng = random.Random(seed)
        for op in operations:
            if op.f != F.SEND and rng.random() < 0.2:
                op.min_off = rng.randint(0, 1)
        ops, obs = tables(History(RunHeader("r"), operations), (TOPIC, 0), Replicas())
        whole = report_of((TOPIC, 0), gather(*copied(ops, obs)), Replicas())
        for width in (1, 2, 5):
            cut = judged_in_chunks(ops, obs, (TOPIC, 0), Replicas(), width, seed=seed)
            where = f"random_history(random.Random({seed})) in chunks of {width}: {operations}"
            assert comparable(cut) == comparable(whole), where
        valid[whole.judged.is_valid] += 1
    assert min(valid.values()) > RANDOM // 8, valid


@pytest.mark.parametrize("kind", gate_part(KINDS, 5), ids=": ".join)
def test_planted_anomalies_in_chunks_get_the_report_of_one_piece(kind: tuple[str, str]) -> None:
    planted = 0
    for seed in range(90):
        if seed >= 30 and planted >= 5:
            break
        history = clean_history(seed)
        try:
            PLANTERS[kind](Scene(history, seed))
        except InapplicableError:
            continue
        replicas = replicas_of(history.replica_reads)
        every = (one.as_append() for one in transactions_of(history.operations).values())
        appends = [op for op in every if op is not None]
        for queue in ((CLEAN_TOPIC, 0), (CLEAN_TOPIC, 1)):
            its = [op for op in appends if (op.topic, op.queue) == queue]
            ops, obs = tables(history, queue, replicas)
            whole = report_of(queue, gather(*copied(ops, obs), its), replicas)
            for width in (1, 3, 8):
                cut = judged_in_chunks(ops, obs, queue, replicas, width, appends=its, seed=seed)
                where = f"{kind} in clean_history({seed}), {queue}, chunks of {width}"
                assert cut.judged == whole.judged, where
                assert add_up([(queue, cut.home)]) == add_up([(queue, whole.home)]), where
                assert (cut.home.lost, cut.home.differ) == (whole.home.lost, whole.home.differ)
        planted += 1
    assert planted >= 5


def test_what_was_refused_and_is_there_twice_is_known_in_chunks() -> None:
    queue = (TOPIC, 0)
    refused = Operation(0, 0, 1, 0, F.SEND, Outcome.FAIL, 1, 2, *queue, value=5)
    stored = Operation(1, 0, 1, 0, F.SEND, Outcome.OK, 3, 4, *queue, off=0, value=5)
    reads = [ReplicaRead(9, "n0", *queue, 0, (5, 5))]
    history = History(RunHeader("r"), [refused, stored], replica_reads=reads)
    replicas = replicas_of(reads)
    ops, obs = tables(history, queue, replicas)
    whole = add_up([(queue, report_of(queue, gather(*copied(ops, obs)), replicas).home)])
    assert whole.named[DUPLICATED] == (5,)
    assert whole.named[FAILED_BUT_THERE] == ()
    cut = judged_in_chunks(ops, obs, queue, replicas, 1)
    assert add_up([(queue, cut.home)]) == whole


def hot_block() -> Block:
    stream = QueueStream(0, 11, HOT_OPS, range(40), 40, 0, 0, HOT_OPS)
    (block,) = stream.blocks()
    return block


def hot_tables(block: Block) -> tuple[Columns, Columns]:
    """Return the rows of a block, the final read of its log included, in a random order."""
    size, kept = len(block.at_ns), len(block.log)
    ops = {**block.ops, "level": np.zeros(size, dtype=np.int64)}
    ops["due_ns"] = np.full(size, NOTHING, dtype=np.int64)
    order = np.random.default_rng(3).permutation(size)
    held = {"op_id": np.full(kept, NOTHING), "off": np.arange(kept), "value": block.log}
    obs = {name: np.concatenate((block.obs[name], reported)) for name, reported in held.items()}
    obs["replica"] = np.zeros(len(obs["off"]), dtype=np.int64)
    of_queue = ops["f"][order] <= F.MIN_OFFSET
    return {name: column[order][of_queue] for name, column in ops.items()}, obs


@pytest.mark.parametrize("plant", gate_part(HOT_PLANTS, 3))
def test_a_hot_queue_in_many_chunks_gets_the_report_of_one_piece(plant: str) -> None:
    block = hot_block()
    witnesses: tuple[int, ...] = ()
    if plant:
        _, planter = planter_named(plant)
        witnesses = planter.act(block, np.random.default_rng(5))
    ops, obs = hot_tables(block)
    whole = report_of(("q", 0), gather(*copied(ops, obs)), ALONE)
    assert whole.judged.is_valid == (not plant or plant == "acknowledged message lost")
    assert plant != "acknowledged message lost" or whole.home.lost
    for chunks in CHUNKS:
        width = -(-len(block.log) // chunks)
        cut = judged_in_chunks(ops, obs, ("q", 0), ALONE, width)
        assert comparable(cut) == comparable(whole), f"{plant}, {chunks} chunks, {witnesses}"


def test_queue_cut_carries_bounds_over_a_border() -> None:
    """A send at the last offset of a chunk is called when a later chunk's first one is known."""
    for chunks in CHUNKS[1:]:
        block = hot_block()
        width = -(-len(block.log) // chunks)
        offs, op_id = block.ops["off"], block.ops["op_id"]
        sends = (block.ops["f"] == F.SEND) & (block.ops["outcome"] == Outcome.OK)
        border = next(
            border
            for border in range(3 * width, len(block.log), width)
            if np.isin((border - 1, border), offs[sends]).all()
        )
        (last,) = np.flatnonzero(sends & (offs == border - 1))
        (first,) = np.flatnonzero(sends & (offs == border))
        late = block.ops["ret_ns"][first] + 1
        block.ops["call_ns"][last], block.ops["ret_ns"][last] = late, late + 1
        ops, obs = hot_tables(block)
        whole = report_of(("q", 0), gather(*copied(ops, obs)), ALONE)
        assert (border - 1) in {pair.low for pair in whole.judged.pairs}
        cut = judged_in_chunks(ops, obs, ("q", 0), ALONE, width)
        assert comparable(cut) == comparable(whole), (chunks, op_id[[first, last]])


def test_equal_values_of_one_offset_lie_the_same_in_every_order() -> None:
    rows = np.arange(4, dtype=np.int64)
    ops = {name: np.zeros(4, dtype=np.int64) for name in OPS_COLUMNS}
    ops |= {"op_id": rows, "call_ns": rows, "ret_ns": rows + 9, "value": np.array([5, 8, 6, 8])}
    ops["max_off"] = ops["min_off"] = np.full(4, NOTHING)
    ops["off"] = np.array([0, 1, 1, 1])
    empty: Columns = {name: np.zeros(0, dtype=np.int64) for name in OBS_COLUMNS}
    reported = set()
    for seed in range(24):
        order = random.Random(seed).sample(range(4), 4)
        parts = [{name: column[[at]] for name, column in ops.items()} for at in order]
        said = report_of(("q", 0), gather(parts, [empty]), ALONE).judged
        reported.add((said.offs, said.values))
    assert reported == {((1,), (8,))}
