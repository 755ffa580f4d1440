"""Run folders as a chaos run leaves them: a group that elects, fails and recovers, made up."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import cbor2
import msgspec

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.verdict import Verdict, merge
from dledger.jepsen_like.history.operation import (
    NEVER,
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
    encode_history,
)
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, encode_plan
from dledger.jepsen_like.report.series import columns_of, counts_of

TOPIC = "orders"
NODES = ("n1", "n2", "n3")
BEGIN_NS = 7_000_000_000
"""A monotonic clock begins anywhere."""


@dataclass
class MadeRun:
    """A run that was made up.

    Attributes:
        history: As it went into the folder.
        verdicts: Of the real checker over that history.
        failover_ms: One per outage.
        outages_s: When no send was served.
    """

    history: History
    verdicts: list[Verdict]
    failover_ms: list[float] = field(default_factory=list)
    outages_s: list[tuple[float, float]] = field(default_factory=list)


def make_run(
    *, operations: int, duration_s: int, faults: int, seed: int = 1, stale_read: bool = False
) -> MadeRun:
    """Return a run over *duration_s* with *operations* spread over it.

    Each fault hits the leader and costs an election. With *stale_read* one read near the end sees
    an end that had long been passed.
    """
    rng = random.Random(seed)
    kinds = (Kind.KILL, Kind.ISOLATE, Kind.DISK_SLOW, *Kind)[: max(3, min(faults, 14))]
    at_s = [duration_s * (place + 0.6) / (faults + 0.4) for place in range(faults)]
    outages = [(at, at + 1.0 + rng.expovariate(0.8)) for at in at_s]
    history = History(RunHeader("made", seed, "", {"python": "3.11"}))
    _add_faults(rng, history, kinds, outages)
    history.operations = _operations(rng, operations, duration_s, outages)
    if stale_read:
        _make_stale(history.operations)
    verdicts = [v for v in check_everything(history) if v.checker == queue_log.NAME]
    failover_ms = [(end - begin) * 1000 for begin, end in outages]
    return MadeRun(history, verdicts, failover_ms, outages)


def _ns(at_s: float) -> int:
    return BEGIN_NS + round(at_s * 1e9)


def _add_faults(
    rng: random.Random,
    history: History,
    kinds: tuple[Kind, ...],
    outages: list[tuple[float, float]],
) -> None:
    leader, term = NODES[0], 1
    history.events.append(Event(_ns(0.2), _ns(0.2), "role", "", leader, f"leader term {term}"))
    for place, (begin, end) in enumerate(outages):
        kind = kinds[place % len(kinds)].value
        history.events.append(
            Event(_ns(begin), _ns(end + rng.uniform(1, 6)), kind, "leader", leader)
        )
        follower = f"follower term {term + 1}"
        history.events.append(Event(_ns(end + 0.5), _ns(end + 0.5), "role", "", leader, follower))
        leader = rng.choice([node for node in NODES if node != leader])
        term += rng.choice((1, 1, 1, 2))
        text = f"leader term {term}"
        history.events.append(Event(_ns(end - 0.05), _ns(end - 0.05), "role", "", leader, text))
    skipped = "skipped: too few members would be left"
    history.events.append(Event(_ns(1.0), _ns(1.0), "wipe", "follower", "n2", skipped))


def _operations(
    rng: random.Random, count: int, duration_s: int, outages: list[tuple[float, float]]
) -> list[Operation]:
    """Return operations that really happened to growing lists, each at an instant within it."""
    left = list(outages)
    happen: list[tuple[float, Operation]] = []
    for op_id, call in enumerate(sorted(rng.uniform(0.3, duration_s) for _ in range(count))):
        while left and left[0][1] <= call:
            left.pop(0)
        f = rng.choices((F.SEND, F.PULL, F.MAX_OFFSET), (5, 4, 1))[0]
        took = rng.lognormvariate(-5.9, 0.5) * (1 if f is F.SEND else 0.4)
        outcome, instant = Outcome.OK, call + took * 0.6
        if left and left[0][0] <= call:
            waits = left[0][1] - call
            outcome = rng.choices(
                (Outcome.OK, Outcome.INFO, Outcome.FAIL), (3, 2 if f is F.SEND else 0, 5)
            )[0]
            took += waits if outcome is Outcome.OK else min(waits, 0.5)
            instant = call + took * 0.999
        op = Operation(op_id, op_id, op_id % 16, -1, f, outcome, _ns(call), _ns(call + took), TOPIC)
        op.queue = rng.randrange(4)
        if f is F.SEND:
            op.value = op_id + 1000
        if outcome is Outcome.INFO:
            op.ret_ns, op.err = NEVER, "UnknownOutcomeError"
        elif outcome is Outcome.FAIL:
            op.err = "BrokerUnreachableError"
        happen.append((instant, op))
    logs: list[list[int]] = [[] for _ in range(4)]
    for _, op in sorted(happen, key=lambda pair: pair[0]):
        _apply(rng, op, logs[op.queue])
    return [op for _, op in happen]


def _apply(rng: random.Random, op: Operation, log: list[int]) -> None:
    if op.f == F.SEND and op.outcome != Outcome.FAIL:
        if op.outcome == Outcome.OK:
            op.off = len(log)
        if op.outcome == Outcome.OK or rng.random() < 0.5:
            log.append(op.value)
    elif op.f == F.PULL:
        op.off = max(0, len(log) - rng.randint(0, 6))
        if op.outcome == Outcome.OK:
            op.values = tuple(log[op.off : op.off + 8])
            op.cnt, op.max_off = len(op.values), len(log)
    elif op.f == F.MAX_OFFSET and op.outcome == Outcome.OK:
        op.max_off = len(log)


def _make_stale(operations: list[Operation]) -> None:
    reads = [op for op in operations if op.f == F.MAX_OFFSET and op.outcome == Outcome.OK]
    reads[-len(reads) // 8].max_off -= 9


def make_samples(made: MadeRun, duration_s: int) -> list[dict[str, object]]:
    """Return the status rows of the nodes, four a second."""
    roles = [event for event in made.history.events if event.kind == "role"]
    roles = [event for event in roles if event.detail.startswith("leader")]
    downs = [event for event in made.history.events if event.kind == "kill"]
    samples: list[dict[str, object]] = []
    behind = dict.fromkeys(NODES, 0)
    for tick in range(duration_s * 4):
        at_ns = _ns(tick / 4)
        last = tick * 40
        leadership = max(
            (e for e in roles if e.at_ns <= at_ns), default=None, key=lambda e: e.at_ns
        )
        for place, node in enumerate(NODES):
            is_up = not any(e.node == node and e.at_ns <= at_ns < e.end_ns for e in downs)
            leads = leadership is not None and leadership.node == node
            behind[node] = behind[node] + 40 if not is_up else behind[node] // 3
            jitter = (tick * 7 + place * 3) % 4
            samples.append(
                {
                    "at_ns": at_ns + place * 1000,
                    "node": node,
                    "role": "leader" if leads else "follower",
                    "term": int(leadership.detail.split()[-1]) if leadership else 0,
                    "commit_index": last,
                    "last_index": last if leads else max(0, last - behind[node] - jitter),
                    "is_up": is_up,
                }
            )
    return samples


def write_run(folder: Path, made: MadeRun, *, duration_s: int, files: int = 2) -> Path:
    """Write the run folder of *made*, its history dealt out over several files."""
    (folder / "history").mkdir(parents=True)
    (folder / "nodes").mkdir()
    for place in range(files):
        part = History(made.history.header, made.history.operations[place::files])
        part.events = made.history.events if place == 0 else []
        (folder / "history" / f"client-{place}.cbor").write_bytes(encode_history(part))
    steps = tuple(
        Step((event.at_ns - BEGIN_NS) // 1_000_000, Kind(event.kind), "leader", 1000)
        for event in made.history.events
        if event.kind != "role"
    )
    (folder / "plan.json").write_text(encode_plan(Plan(1, duration_s * 1000, steps)))
    samples = make_samples(made, duration_s)
    (folder / "samples.cbor").write_bytes(b"".join(map(cbor2.dumps, samples)))
    for node in NODES:
        lines = [f"{at / 10:.1f} {node} entry_applied index={at}" for at in range(450)]
        (folder / "nodes" / f"{node}.log").write_text("\n".join(lines) + "\n")
    whole = merge(made.verdicts)
    result = {
        "verdict": whole.validity,
        "reason": whole.reason,
        "verdicts": msgspec.to_builtins(made.verdicts),
        "counts": counts_of(columns_of(made.history.operations)),
        "faults": {"kill": 1},
        "skipped": [{"kind": "wipe", "reason": "too few members would be left"}],
        "failover_ms": made.failover_ms,
        "command": "dledger chaos run --seed 1",
        "versions": {"dledger-mq": "0.1.0"},
        "begin": "2031-05-04 10:00:00",
        "end": "2031-05-04 10:02:00",
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder
