"""A run is judged while it goes on: at once, like the whole one, and by what is in flight."""

import json
from pathlib import Path

import msgspec
import pytest

from dledger.cli.main import main
from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.queue_watch import VALUES_KEPT, QueueWatch
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import (
    NEVER,
    F,
    History,
    Level,
    Operation,
    Outcome,
    RunHeader,
)
from dledger.spark_jobs.generate.history import Shape
from dledger.spark_jobs.live import GIVEN_UP_NS, LiveCheck, Progress, Tail, follow
from tests.harness.fast_part import gate_part
from tests.harness.generated import generated
from tests.harness.played_runs import PlayedRun, as_called, writes
from tests.harness.rows import row

pytestmark = pytest.mark.slow

CLIENTS = 20
WRITES = 60
TIMES = ("stale-read", "non-monotonic-read", "send-order-inverted", "read-from-the-future")


def played(operations: list[Operation], folder: Path) -> list[tuple[Progress, set[int]]]:
    """Play a run; return how it stood after each write, and what had ended by then."""
    run, live = PlayedRun(folder), LiveCheck()
    tail = Tail(folder)
    reported: list[tuple[Progress, set[int]]] = []
    for number, rows in enumerate(writes(operations, WRITES)):
        run.write(rows, torn=number % 3 if number + 1 < WRITES else 0)
        reported.append((live.take(tail.next()), set(run.ended)))
    return reported


def found(reported: list[tuple[Progress, set[int]]]) -> list[Violation]:
    return [violation for progress, _ in reported for violation in progress.violations]


@pytest.mark.parametrize("plant", gate_part(TIMES, 2))
def test_anomaly_reported_in_the_batch_that_completes_it(plant: str, tmp_path: Path) -> None:
    history, made = generated(Shape(4_000, CLIENTS, 2, seed=7, plant=plant), tmp_path / "made")
    reported = played(history.operations, tmp_path / "run")
    (violation,) = found(reported)
    assert violation.name == made.plant
    assert set(violation.operations) == set(made.witnesses)
    (batch,) = [at for at, (progress, _) in enumerate(reported) if progress.violations]
    complete = [at for at, (_, ended) in enumerate(reported) if ended >= set(made.witnesses)]
    assert 0 < batch < WRITES - 1
    # Two bytes of a write may come with the next one.
    assert batch - complete[0] in (0, 1)
    offline = check_everything(History(RunHeader("r"), history.operations))
    assert {v.name for verdict in offline for v in verdict.violations} == {made.plant}


@pytest.mark.parametrize("plant", ["duplicate", "aborted-read", "read-contradicts-itself"])
def test_values_are_judged_as_far_as_they_are_remembered(plant: str, tmp_path: Path) -> None:
    history, made = generated(Shape(4_000, CLIENTS, 2, seed=7, plant=plant), tmp_path / "made")
    names = {violation.name for violation in found(played(history.operations, tmp_path / "run"))}
    assert names == {made.plant}


@pytest.mark.parametrize("seed", gate_part(range(8), 2))
def test_a_correct_run_is_never_accused(seed: int, tmp_path: Path) -> None:
    history, _ = generated(Shape(3_000, CLIENTS, 3, seed=seed), tmp_path / "made")
    reported = played(history.operations, tmp_path / "run")
    assert not found(reported)
    judged = [op for op in history.operations if op.f <= F.FETCH_COMMIT]
    assert reported[-1][0].operations == len(judged)


@pytest.mark.parametrize(
    ("level", "off", "cnt", "max_off", "is_wrong"),
    [
        (Level.LINEARIZABLE, 1, 0, 3, True),
        (Level.LINEARIZABLE, 3, 0, 3, False),
        (Level.LINEARIZABLE, 0, 0, -2, True),
        (Level.LINEARIZABLE, 0, 2, 1, True),
        (Level.LOCAL, 0, 2, 1, False),
        (Level.LOCAL, 1, 0, 3, False),
    ],
)
def test_reads_contradict_themselves_as_in_the_whole_check(
    level: Level, off: int, cnt: int, max_off: int, is_wrong: bool
) -> None:
    sends = [row(at, F.SEND, 1 + at, 9, off=at, value=at) for at in range(3)]
    fields = {"process": 2, "off": off, "cnt": cnt, "max_off": max_off, "level": level}
    pull = row(9, F.PULL, 8, 12, values=tuple(range(off, off + cnt)), **fields)
    name = queue_log.SELF_CONTRADICTION
    found = QueueWatch().take([*sends, pull], 0)
    assert [(v.name, v.operations) for v in found] == [(name, (9,))] * is_wrong
    (verdict, *_) = check_everything(History(RunHeader("r"), [*sends, pull]))
    assert verdict.checker == queue_log.NAME
    assert [(v.name, v.operations) for v in verdict.violations] == [(name, (9,))] * is_wrong


def test_what_is_kept_does_not_grow_with_the_run(tmp_path: Path) -> None:
    history, _ = generated(Shape(30_000, CLIENTS, 1), tmp_path / "made")
    reported = [progress for progress, _ in played(history.operations, tmp_path / "run")]
    assert sum(op.f == F.SEND and op.outcome == Outcome.OK for op in history.operations) > 14_000
    in_a_write = 30_000 // WRITES
    assert max(progress.in_flight for progress in reported) < 2 * in_a_write
    # Unknown sends that are never seen are waited for; all else is in flight or remembered.
    rest = [progress.kept - progress.in_flight for progress in reported]
    assert max(rest) < 2 * (VALUES_KEPT + in_a_write) + 30_000 // 50
    assert max(progress.in_flight for progress in reported[WRITES // 2 :]) <= 2 * max(
        progress.in_flight for progress in reported[: WRITES // 2]
    )


def test_an_operation_that_stays_open_holds_back_what_is_closed(tmp_path: Path) -> None:
    """It may still return an offset that was missed; when it does, that is found."""
    sends = [row(at, F.SEND, at * 10, at * 10 + 5, off=at, value=at) for at in range(1, 50)]
    late = row(0, F.SEND, 0, 900, process=2, off=0, value=77)
    read = row(99, F.MAX_OFFSET, 905, 910, process=3, max_off=20)
    run, live = PlayedRun(tmp_path / "run"), LiveCheck()
    tail = Tail(run.folder)
    run.write([as_called(late)])
    live.take(tail.next())
    for op in sends:
        run.write([as_called(op), op])
        progress = live.take(tail.next())
    assert (progress.in_flight, progress.open) == (49, 1)
    run.write([late, as_called(read)])
    live.take(tail.next())
    run.write([read])
    violations = live.take(tail.next()).violations
    assert {(violation.name, violation.operations[0]) for violation in violations} == {
        (queue_log.STALE_READ, 99)
    }
    assert violations[0].operations == (99, 48), "of closed offsets the last one is kept"
    run.write([as_called(op) for op in [msgspec.structs.replace(read, op_id=100, call_ns=2_000)]])
    live.take(tail.next())
    run.write([msgspec.structs.replace(read, op_id=101, call_ns=2_000, ret_ns=2_001, max_off=50)])
    assert live.take(tail.next()).in_flight <= 2


def test_an_operation_whose_client_is_lost_is_given_up(tmp_path: Path) -> None:
    lost = row(0, F.SEND, 0, NEVER, process=2, outcome=Outcome.INFO, value=77)
    run = PlayedRun(tmp_path / "run")
    tail = Tail(run.folder)
    run.write([lost])
    assert tail.next().open == 1
    sends = [
        row(at, F.SEND, GIVEN_UP_NS * at, GIVEN_UP_NS * at + 5, off=at, value=at) for at in (1, 2)
    ]
    run.write(sends)
    assert tail.next().horizon_ns == 0
    run.write(sends[:1])
    reported = tail.next()
    assert (reported.open, reported.horizon_ns) == (0, GIVEN_UP_NS * 2 + 5)


def test_a_watch_survives_being_kept_as_bytes(tmp_path: Path) -> None:
    history, made = generated(Shape(2_000, CLIENTS, 1, plant="stale-read"), tmp_path)
    ended = sorted(history.operations, key=lambda op: op.ret_ns)
    watch, names = QueueWatch("orders/0"), []
    for at in range(0, len(ended), 100):
        names += [v.name for v in watch.take(ended[at : at + 100], 0)]
        watch = msgspec.msgpack.decode(msgspec.msgpack.encode(watch), type=QueueWatch)
    assert names == [made.plant]


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    history, made = generated(Shape(2_000, CLIENTS, 1, plant="stale-read"), tmp_path / "made")
    run = PlayedRun(tmp_path / "run")
    parts = list(writes(history.operations, 5))
    reported: list[Progress] = []

    def sleep(_: float) -> None:
        run.write(parts.pop(0))

    violations = follow(run.folder, reported.append, sleep, lambda: not parts)
    assert [violation.name for violation in violations] == [made.plant]
    assert [progress.batch for progress in reported] == [1, 2, 3, 4, 5]


def test_the_command_follows_and_then_judges_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history, made = generated(Shape(2_000, CLIENTS, 1, plant="stale-read"), tmp_path / "made")
    run = PlayedRun(tmp_path / "run")
    run.write([row for rows in writes(history.operations, 1) for row in rows])
    (run.folder / "result.json").write_text("{}")
    assert main(["check", str(run.folder), "--follow", "--output", "json"]) == 1
    reported = capsys.readouterr()
    assert f"INVALID: {made.plant} in orders/0" in reported.err
    outcome = json.loads(reported.out)
    assert [anomaly["name"] for anomaly in outcome["anomalies"]] == [made.plant]
    assert main(["check", str(run.folder), "--output", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["digest"] == outcome["digest"]
