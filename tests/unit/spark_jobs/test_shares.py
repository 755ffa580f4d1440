"""Facts gathered per split and merged per chunk are those of all rows in one place."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dledger.jepsen_like.checkers import total_queue
from dledger.jepsen_like.checkers.all_checks import check_source
from dledger.jepsen_like.checkers.kernel.chunks import Answer, Ask
from dledger.jepsen_like.checkers.kernel.cut import ChunkReport, answer_of, judge_cut, report_of
from dledger.jepsen_like.checkers.kernel.facts import I64, SUSPECTS_MAX, QueueFacts
from dledger.jepsen_like.checkers.kernel.home import Home
from dledger.jepsen_like.checkers.kernel.judge import Judged
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas
from dledger.jepsen_like.checkers.kernel.tables import Batch, Gathered, MemorySource, spares_of
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.jepsen_like.history.columns import OBS, OPS, obs_table, ops_table
from dledger.jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from dledger.spark_jobs.engines.shares import (
    CUT,
    ROWS,
    SUMMED,
    Counters,
    CutReport,
    Judge,
    Share,
    Sharer,
    counters_of,
    cut_report,
    first_look,
    joined,
    may_repeat,
    number_of,
    rows_key,
)
from dledger.spark_jobs.generate.history import Shape
from tests.harness.clean_histories import clean_history
from tests.harness.fast_part import gate_part
from tests.harness.generated import generated
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_scene import InapplicableError, Scene
from tests.harness.queue_histories import folded, random_history
from tests.harness.rows import row

pytestmark = pytest.mark.slow

NO_REPLICAS = Replicas()


def of_rows(rows: list[Operation]) -> History:
    return History(RunHeader("r"), rows)


def in_one_place(rows: list[Operation]) -> list[QueueReport]:
    gathered = Gathered()
    for batch in ops_table("r", rows).to_batches():
        gathered.add_ops(Batch(batch, {}, OPS))
    for batch in obs_table("r", rows, ()).to_batches():
        gathered.add_obs(Batch(batch, {}, OBS), NO_REPLICAS)
    return gathered.reports({}, NO_REPLICAS)


class Split:
    """Rows dealt to tasks by lot, each of which gathers facts by itself."""

    def __init__(self, history: History, width: int, seed: int, replicas: Replicas) -> None:
        self.width, self.seed, self.replicas = width, seed, replicas
        rows = history.operations
        self.tables = (ops_table("r", rows), obs_table("r", rows, history.replica_reads))
        self.sends = [op for op in rows if op.f == F.SEND and op.outcome != Outcome.FAIL]
        self.queue: Queue = ("", 0)
        self.known: list[CutReport] = []

    def shares(self, only: Queue | None = None) -> list[Share]:
        rng = random.Random(self.seed)
        found: list[Share] = []
        for table, schema, name in zip(self.tables, (OPS, OBS), ("ops", "obs"), strict=True):
            order = list(range(table.num_rows))
            rng.shuffle(order)
            for at in range(0, len(order), 7):
                sharer = Sharer(self.width, self.replicas, only)
                for batch in table.take(order[at : at + 7]).combine_chunks().to_batches():
                    sharer.add(name, Batch(batch, {}, schema))
                found += sharer.take()
        rng.shuffle(found)
        return found

    def judged(self, judge: Judge, only: Queue | None = None) -> Iterator[tuple[Queue, int, bytes]]:
        return joined(self.shares(only), self.width, judge)

    def reports(self, appends: Mapping[Queue, tuple[Operation, ...]]) -> list[QueueReport]:
        added = {queue: spares_of(ops) for queue, ops in appends.items()}
        found: list[QueueReport] = []
        cut: dict[Queue, list[CutReport]] = {}
        look = first_look(self.replicas, added, self.tables[0].num_rows)
        for queue, kind, report in self.judged(look):
            if kind == CUT:
                cut.setdefault(queue, []).append(msgspec.msgpack.decode(report, type=CutReport))
            else:
                found.append(msgspec.msgpack.decode(report, type=QueueReport))
        for queue, reports in cut.items():
            self.queue, self.known = queue, reports
            found.append(judge_cut(queue, self, added.get(queue), self.replicas))
        for queue in set(added) - {report.key for report in found}:
            facts = QueueFacts()
            facts.add_spares(added[queue])
            found.append(report_of(queue, facts, self.replicas))
        return sorted(found, key=lambda report: report.key)

    # -- the passes over a queue that is cut --------------------------------------------------

    def first(self, limit: int | None) -> list[ChunkReport]:
        def judge(queue: Queue, _: int, facts: QueueFacts, __: bool) -> tuple[int, CutReport]:
            return CUT, cut_report(queue, facts, self.replicas, limit)

        if limit is not None:
            every = self.judged(judge, self.queue)
            self.known = [msgspec.msgpack.decode(one, type=CutReport) for *_, one in every]
        return [one.report for one in self.known]

    def again(self, asks: dict[int, Ask], limit: int | None) -> list[Answer]:
        answers = []

        def judge(_: Queue, __: int, facts: QueueFacts, ___: bool) -> tuple[int, None]:
            answers.append(answer_of(facts, self.replicas, asks[facts.begin], limit))
            return CUT, None

        for _ in self.judged(judge, self.queue):
            pass
        return answers

    def repeated(self, added: I64) -> I64:
        places: dict[int, set[int]] = {}
        spares = Counter(added.tolist())
        for op in self.sends:
            if (op.topic, op.queue) != self.queue:
                continue
            if op.outcome == Outcome.OK and op.off != NOTHING:
                places.setdefault(op.value, set()).add(op.off)
            else:
                spares[op.value] += 1
        found = {v for v, offs in places.items() if len(offs) + spares[v] > 1}
        found |= {value for value, count in spares.items() if count > 1}
        chunks = [one.counters for one in self.known]
        alone = np.array([*spares.elements()], dtype=np.int64)
        assert may_repeat(chunks, alone) or not found
        return np.array(sorted(found)[: SUSPECTS_MAX + 1], dtype=np.int64)


class SplitSource(MemorySource):
    """A history whose queues are judged from shares."""

    def __init__(self, history: History, width: int) -> None:
        super().__init__(history)
        self.history, self.width = history, width

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        return Split(self.history, self.width, 5, replicas).reports(appends)


@pytest.mark.parametrize("kind", gate_part(PLANTERS, 3), ids=": ".join)
def test_every_planted_anomaly_has_one_digest_from_shares(kind: tuple[str, str]) -> None:
    planted = 0
    for seed in range(60):
        history = clean_history(seed)
        try:
            PLANTERS[kind](Scene(history, seed))
        except InapplicableError:
            continue
        expected = check_source(MemorySource(history))
        for width in (1, 3, 1_000):
            found = check_source(SplitSource(history, width))
            where = f"{kind} in clean_history({seed}), chunks of {width}"
            assert digest_of(found) == digest_of(expected), where
        planted += 1
        if planted == 2:
            break
    assert planted, f"{kind} found no place"


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


@pytest.mark.parametrize("width", gate_part([1, 2, 5, 1_000], 1))
def test_random_histories_are_judged_as_in_one_place(width: int) -> None:
    for first in range(0, 200, 10):
        rows: list[Operation] = []
        for seed in range(first, first + 10):
            rng = random.Random(seed)
            history = random_history(rng, 12 if seed % 4 else 30)
            for op in folded(history, rng) if seed % 3 == 0 else history:
                op.queue, op.op_id = seed, op.op_id + seed * 1_000
                if op.f != F.SEND and rng.random() < 0.2:
                    op.min_off = rng.randint(0, 1)
                rows.append(op)
        expected = {report.key: comparable(report) for report in in_one_place(rows)}
        found = {
            report.key: comparable(report)
            for report in Split(of_rows(rows), width, first, NO_REPLICAS).reports({})
        }
        assert found == expected, f"random_history, seeds {first} to {first + 9}"


@pytest.mark.parametrize("plant", gate_part(["duplicate", "stale-read", "slot-of-no-send"], 1))
def test_a_cut_queue_is_judged_as_in_one_place(plant: str, tmp_path: Path) -> None:
    made, _ = generated(Shape(600, 10, 2, seed=3, plant=plant), tmp_path)
    rows = made.operations
    expected = {report.key: report.judged for report in in_one_place(rows)}
    for width in (40, 100_000):
        found = {
            report.key: report.judged
            for report in Split(of_rows(rows), width, 5, NO_REPLICAS).reports({})
        }
        assert found == expected


def test_chunks_of_a_wrong_count_hold_nothing() -> None:
    """One answer that counts too much names chunks that no send of the history can fill."""
    width = 1 << 14
    send = row(0, F.SEND, 1, 2, off=0, value=7)
    pull = row(1, F.PULL, 3, 4, process=2, off=0, cnt=width << 6, range_hash=5)
    history = of_rows([send, pull])
    split = Split(history, width, 1, NO_REPLICAS)
    reports = [report for *_, report in split.judged(first_look(NO_REPLICAS, {}, 2))]
    assert len(reports) == 1 << 6
    assert sum(map(len, reports)) < 1 << 16
    expected = check_source(MemorySource(history))
    assert digest_of(check_source(SplitSource(history, width))) == digest_of(expected)


def test_what_was_refused_and_is_there_twice_is_known_in_chunks() -> None:
    refused = row(0, F.SEND, 1, 2, outcome=Outcome.FAIL, value=5)
    stored = row(1, F.SEND, 3, 4, off=0, value=5)
    reads = [ReplicaRead(9, "n0", refused.topic, refused.queue, 0, (5, 5))]
    history = History(RunHeader("r"), [refused, stored], replica_reads=reads)
    expected = check_source(MemorySource(history))
    (verdict,) = (each for each in expected if each.checker == total_queue.NAME)
    assert {violation.name for violation in verdict.violations} == {total_queue.DUPLICATED}
    assert digest_of(check_source(SplitSource(history, 1))) == digest_of(expected)


@pytest.mark.parametrize("width", [2, 100])
def test_of_equal_ends_the_first_operation_is_the_witness(width: int) -> None:
    rows = [row(n, F.MAX_OFFSET, 1, 2, max_off=4) for n in range(20)]
    expected = [report.judged for report in in_one_place(rows)]
    for seed in range(4):
        found = Split(of_rows(rows), width, seed, NO_REPLICAS).reports({})
        assert [report.judged for report in found] == expected, f"Split, seed {seed}"


def test_counters_meet_where_two_chunks_hold_one_value() -> None:
    some, others = np.arange(5, 900, 2), np.arange(900, 2_000)
    chunks = [counters_of(some), counters_of(others)]
    assert all(one.is_exact for one in chunks)
    assert not may_repeat(chunks, np.array([4, 6]))
    assert may_repeat(chunks, np.array([7]))
    assert may_repeat([*chunks, counters_of(np.array([1_999]))], others[:0])
    far = np.array([2, 1 << 20, 1 << 38])
    assert not may_repeat(chunks, far)
    assert may_repeat(chunks, np.append(far, 1 << 20))
    assert may_repeat(chunks, np.append(far, 1_999))
    assert not may_repeat([Counters()], others[:0])


def test_counters_that_are_far_apart_or_twice_decide_nothing() -> None:
    assert may_repeat([counters_of(np.array([1, 1]))], np.zeros(0, np.int64))
    assert may_repeat([counters_of(np.array([1, 1 << 39]))], np.zeros(0, np.int64))


def test_rows_of_wants_go_through_as_they_are() -> None:
    keys = [rows_key(number) for number in (0, 1, 7)]
    assert [number_of(key) for key in keys] == [0, 1, 7]
    assert number_of(SUMMED) < 0
    assert number_of(("T", -9)) < 0
    shares = [Share(key, 5, b"%d" % at) for at, key in enumerate(keys)]
    found = list(joined(shares, 10, first_look(NO_REPLICAS, {})))
    assert found == [(key, ROWS, b"%d" % at) for at, key in enumerate(keys)]
