"""Delayed messages, replicas and the multiset: a clean history, and each anomaly planted in it.

Groups that acknowledge early: what they may lose, and what they may not.
The queue checker by hand: what proves nothing, what is undecided, and rare shapes of a loss.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import delayed, queue_log, replicas, total_queue
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.fault_record import Faults, with_late_effect
from dledger.jepsen_like.checkers.kernel.facts import REPORTED_MAX
from dledger.jepsen_like.checkers.kernel.tables import MemorySource
from dledger.jepsen_like.checkers.verdict import Verdict, merge
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    Event,
    F,
    History,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
)
from tests.harness.judged import judged
from tests.harness.queue_histories import TOPIC, random_history
from tests.harness.rows import row

NODES = ("n0", "n1", "n2")


def clean_history() -> History:
    """Two sends, one unknown and there, one delayed; three replicas; reads and a commit."""
    history = History(RunHeader("clean"))
    history.operations = [
        Operation(0, 0, 0, -1, F.SEND, Outcome.OK, 0, 10, "t", 0, 0, value=100),
        Operation(1, 1, 1, -1, F.SEND, Outcome.INFO, 5, NEVER, "t", 0, value=101),
        Operation(2, 2, 0, -1, F.SEND, Outcome.FAIL, 5, 9, "t", 0, value=102),
        Operation(3, 3, 0, -1, F.SEND, Outcome.OK, 20, 30, "d", 0, value=103, due_ns=1_000),
        Operation(4, 4, 2, -1, F.PULL, Outcome.OK, 40, 50, "t", 0, 0, 2, 2, 0, values=(100, 101)),
        Operation(5, 5, 2, -1, F.PULL, Outcome.OK, 990, 1_100, "d", 0, 0, 1, 1, 0, values=(103,)),
        Operation(6, 6, 2, -1, F.COMMIT, Outcome.OK, 60, 70, "t", 0, 2, group="g"),
        Operation(7, 7, 2, -1, F.FETCH_COMMIT, Outcome.OK, 80, 90, "t", 0, 2, group="g"),
    ]
    history.replica_reads = [
        ReplicaRead(2_000, node, topic, 0, 0, values)
        for node in NODES
        for topic, values in (("t", (100, 101)), ("d", (103,)))
    ]
    history.replica_states = [ReplicaState(2_000, node, 9, 0xC0FFEE, "aa") for node in NODES]
    return history


def names(verdict: Verdict) -> set[str]:
    return {violation.name for violation in verdict.violations}


def test_a_clean_history_is_valid_for_every_checker() -> None:
    verdicts = check_everything(clean_history())
    assert {verdict.checker: verdict.validity for verdict in verdicts} == {
        "queue_log": "valid",
        "consumer_offsets": "valid",
        "delayed": "valid",
        "replicas": "valid",
        "total_queue": "valid",
    }
    whole = merge(verdicts)
    assert whole.is_valid
    assert whole.counts["total_queue.recovered"] == 1
    assert whole.counts["delayed.sends"] == 1


def see_early(history: History) -> None:
    history.operations[5].ret_ns = 999


def deliver_twice(history: History) -> None:
    for at in (1, 3, 5):
        history.replica_reads[at] = ReplicaRead(2_000, NODES[at // 2], "d", 0, 0, (103, 103))


def lose_delayed(history: History) -> None:
    del history.operations[5]
    history.replica_reads = [read for read in history.replica_reads if read.topic == "t"]


def unknown_delayed(history: History) -> None:
    history.operations[3].outcome, history.operations[3].ret_ns = Outcome.INFO, NEVER


@pytest.mark.parametrize(
    ("plant", "name"), [(see_early, delayed.EARLY), (deliver_twice, delayed.TWICE)]
)
def test_unknown_delayed_send_that_came_is_judged(
    plant: Callable[[History], None], name: str
) -> None:
    history = clean_history()
    unknown_delayed(history)
    assert delayed.check_history(history).is_valid
    plant(history)
    assert names(delayed.check_history(history)) == {name}


def test_unknown_delayed_send_that_never_came_proves_nothing() -> None:
    history = clean_history()
    unknown_delayed(history)
    lose_delayed(history)
    assert delayed.check_history(history).validity == "unknown"


def test_clock_error_excuses_what_it_explains() -> None:
    history = clean_history()
    see_early(history)
    assert delayed.check_history(history, clock_error_ns=1).is_valid


def test_before_the_drain_a_missing_delayed_message_is_not_lost() -> None:
    history = clean_history()
    lose_delayed(history)
    assert delayed.check_history(history, drained=False).is_valid


def behind(history: History) -> None:
    history.replica_states[2].applied_index = 8


def test_a_replica_that_began_later_is_compared_where_both_hold() -> None:
    history = clean_history()
    history.replica_reads[2] = ReplicaRead(2_000, "n1", "t", 0, 1, (101,))
    assert judged(replicas.NAME, history).is_valid


def test_replicas_may_differ_in_progress_while_faults_go_on() -> None:
    history = clean_history()
    behind(history)
    assert judged(replicas.NAME, history, settled=False).is_valid


def test_without_a_final_read_nothing_is_proved() -> None:
    history = msgspec.structs.replace(clean_history(), replica_reads=[], replica_states=[])
    assert judged(total_queue.NAME, history).validity == "unknown"
    assert judged(replicas.NAME, history).validity == "unknown"


def test_what_retention_removed_is_not_lost() -> None:
    history = clean_history()
    del history.operations[5]  # the pull that saw the delayed one
    for read in history.replica_reads:
        read.min_off, read.values = len(read.values), ()
    assert judged(replicas.NAME, history).is_valid
    assert delayed.check_history(history).is_valid
    assert judged(total_queue.NAME, history).is_valid
    assert judged(total_queue.NAME, history).counts["removed"] == 2


def test_total_queue_expects_a_send_without_an_offset() -> None:
    history = clean_history()
    history.operations[0].off = -1
    assert judged(total_queue.NAME, history).is_valid
    for read in history.replica_reads[::2]:
        read.values = ()
    verdict = judged(total_queue.NAME, history)
    assert total_queue.LOST in names(verdict)
    for read in history.replica_reads[::2]:
        read.min_off = 2  # the beginning of the queue is not there: the send may have been in it
    assert judged(total_queue.NAME, history).is_valid


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"off": 1 << 63}, "OverflowError"),
        ({"queue": 1 << 31}, "too large to fit"),
        ({"f": 200}, "too large to fit"),
        ({"status": 1 << 15}, "too large to fit"),
        ({"topic": None}, "numbers of 64 bits and words"),
        ({"group": "\ud800"}, "Unicode"),
        ({"values": (1, 1 << 63)}, "OverflowError"),
    ],
)
def test_number_that_no_column_holds_is_unknown(field: dict[str, Any], said: str) -> None:
    row = Operation(0, 0, 1, 0, 1, Outcome.OK, 1, 2, "T", 0, 0, 2, values=(7, 8))
    history = clean_history()
    history.operations = [row, msgspec.structs.replace(row, **{"op_id": 1, **field})]
    (verdict,) = check_everything(history)
    assert (verdict.checker, verdict.validity) == ("rows", "unknown")
    assert said in verdict.reason


WINDOW_NS = 100


def sent(value: int, at_ns: int, off: int) -> Operation:
    return row(value, F.SEND, at_ns, at_ns + 10, off=off, value=value)


def history(*operations: Operation, there: tuple[int, ...], faults: tuple[int, ...]) -> History:
    events = [Event(at_ns, at_ns + 50, "isolate") for at_ns in faults]
    reads = [ReplicaRead(100_000, node, "t", 0, 0, there) for node in ("a", "b", "c")]
    return History(
        RunHeader("r"), list(operations), [*events, Event(9_000, 9_000, "healed")], reads
    )


def found(history: History, window_ns: int = WINDOW_NS) -> set[str]:
    verdicts = check_everything(history, Settings(settled=True, late_effect_ns=window_ns))
    return {violation.name for verdict in verdicts for violation in verdict.violations}


SENDS = (sent(1, 0, 0), sent(2, 1_000, 1), sent(3, 5_000, 1))


def test_what_is_lost_to_a_fault_in_its_window_is_allowed() -> None:
    lost = history(*SENDS, there=(1, 3), faults=(1_100,))
    assert "acknowledged message lost" in found(lost, 0)
    assert found(lost) == set()


def test_what_is_lost_without_a_fault_is_found() -> None:
    for at_ns in (800, 1_111, 5_200):
        lost = history(*SENDS, there=(1, 3), faults=(at_ns,))
        assert "acknowledged message lost" in found(lost), at_ns


def test_what_was_never_sent_is_found_beside_a_fault() -> None:
    strange = history(*SENDS, there=(1, 7, 3), faults=(1_100, 5_000))
    assert "message never sent" in found(strange)


def test_an_order_that_is_inverted_is_found_beside_a_fault() -> None:
    inverted = history(sent(1, 0, 0), sent(2, 1_000, 2), sent(3, 5_000, 1), there=(), faults=(9,))
    inverted.replica_reads = []
    verdicts = check_everything(inverted, Settings(settled=False, late_effect_ns=WINDOW_NS))
    assert [v.name for verdict in verdicts for v in verdict.violations] == ["send order inverted"]


def test_only_sends_and_commits_become_unknown() -> None:
    rows = (
        SENDS[1],
        row(5, F.PULL, 1_000, 1_010, off=0, max_off=2),
        row(6, F.COMMIT, 1_000, 1_010, off=4, group="g"),
        row(7, F.SEND, 1_000, 1_010, outcome=Outcome.FAIL, value=7),
    )
    before = history(*rows, there=(), faults=(1_005,))
    after = with_late_effect(before, WINDOW_NS).operations
    assert [(op.outcome, op.off) for op in after] == [
        (Outcome.INFO, NOTHING),
        (Outcome.OK, 0),
        (Outcome.INFO, 4),
        (Outcome.FAIL, NOTHING),
    ]
    assert [op.ret_ns == NEVER for op in after] == [True, False, True, False]
    assert tuple(before.operations) == rows


def test_a_fault_is_met_from_its_begin_to_its_end() -> None:
    faults = Faults([Event(10, 90, "pause"), Event(20, 30, "kill"), Event(0, 0, "healed")])
    meets = [(0, 9), (0, 10), (50, 60), (90, 95), (91, 99)]
    assert [faults.meet(*span) for span in meets] == [False, True, True, True, False]
    assert not Faults([]).meet(0, 9)


def test_a_history_that_is_not_in_memory_is_unknown() -> None:
    source = MemorySource(history(*SENDS, there=(1, 2), faults=()))
    (verdict,) = check_source(source, Settings(late_effect_ns=1))
    assert verdict.validity == "unknown"


def check_history(operations: list[Operation]) -> Verdict:
    return judged(queue_log.NAME, operations)


def queue_row(op_id: int, f: F, call: int, ret: int, **fields: Any) -> Operation:
    return row(op_id, f, call, ret, **{"process": op_id, "topic": TOPIC, **fields})


def send(op_id: int, off: int, call: int, ret: int, *, outcome: Outcome = Outcome.OK) -> Operation:
    off = off if outcome is Outcome.OK else NOTHING
    return queue_row(op_id, F.SEND, call, ret, outcome=outcome, off=off, value=100 + op_id)


def pull(op_id: int, off: int, values: tuple[int, ...], end: int, call: int, ret: int) -> Operation:
    fields = {"off": off, "cnt": len(values), "max_off": end, "min_off": 0, "values": values}
    return queue_row(op_id, F.PULL, call, ret, **fields)


def max_offset(op_id: int, end: int, call: int, ret: int) -> Operation:
    return queue_row(op_id, F.MAX_OFFSET, call, ret, max_off=end)


INFO, FAIL = Outcome.INFO, Outcome.FAIL


def transaction(value: int, end_ret: int) -> list[Operation]:
    fields = {"process": 1, "value": value, "txn": 1}
    end = queue_row(11, F.END_TRANSACTION, 20, end_ret, decision=Decision.COMMIT, **fields)
    return [queue_row(10, F.HALF, 0, 10, **fields), end]


ABSENT = {
    "a transaction": ([*transaction(100, 30), max_offset(2, 0, 40, 50)], (2, 11)),
    "a transaction and a send": (
        [*transaction(99, 30), send(0, 0, 40, 50), max_offset(2, 1, 60, 70)],
        (2, 11),
    ),
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_acknowledged_send_that_a_read_proves_absent(name: str) -> None:
    operations, witnesses = ABSENT[name]
    verdict = check_history(operations)
    assert [(v.name, v.operations) for v in verdict.violations] == [
        (queue_log.STALE_READ, witnesses)
    ]


def test_send_refused_then_stored_is_no_aborted_read() -> None:
    refused, stored = send(0, 0, 0, 10, outcome=FAIL), send(1, 0, 20, 30)
    stored.value = refused.value
    read = pull(2, 0, (refused.value,), 1, 40, 50)
    assert check_history([refused, stored, read]).is_valid
    unknown = send(1, 0, 20, 30, outcome=INFO)
    unknown.value = refused.value
    assert check_history([refused, unknown, read]).is_valid
    stale = max_offset(3, 0, 60, 70)
    assert check_history([refused, stored, read, stale]).validity == "invalid"


def test_a_value_sent_twice_may_be_there_twice() -> None:
    rows = [send(0, 0, 0, 10), send(1, 1, 20, 30), pull(2, 0, (100, 100), 2, 40, 50)]
    rows[1].value = 100
    (verdict,) = [v for v in check_everything(of_rows(rows)) if v.checker == queue_log.NAME]
    assert verdict.validity == "unknown"
    assert "several sends" in verdict.reason
    rows[2].values = (100, 100, 100)
    rows[2].cnt = rows[2].max_off = 3
    rows.append(send(5, 0, 0, 10, outcome=INFO))
    (verdict,) = [v for v in check_everything(of_rows(rows)) if v.checker == queue_log.NAME]
    assert {v.name for v in verdict.violations} == {queue_log.DUPLICATE}


def of_rows(rows: list[Operation]) -> History:
    return History(RunHeader("r"), rows)


def test_an_empty_pull_below_its_own_end_contradicts_itself() -> None:
    rows = [send(0, 0, 0, 10), pull(1, 0, (), 1, 20, 30)]
    verdict = check_history(rows)
    assert [(v.name, v.operations) for v in verdict.violations] == [
        (queue_log.SELF_CONTRADICTION, (1,))
    ]
    rows[1].min_off = 1  # it was removed
    assert check_history(rows).is_valid
    rows[1].min_off, rows[1].off = 0, 1
    assert check_history(rows).is_valid


def test_a_local_read_proves_values_and_no_times() -> None:
    behind = pull(1, 0, (), 0, 20, 30)
    behind.level = Level.LOCAL
    assert check_history([send(0, 0, 0, 10), behind]).is_valid
    wrong = pull(2, 0, (777,), 1, 20, 30)
    wrong.level = Level.LOCAL
    assert check_history([send(0, 0, 0, 10), wrong]).validity == "invalid"


def test_values_of_a_pull_without_an_answer_prove_nothing() -> None:
    pending = pull(1, 0, (777,), 1, 20, NEVER)
    pending.outcome = INFO
    assert check_history([send(0, 0, 0, 10), pending]).is_valid


def test_nothing_to_check_is_unknown_and_never_valid() -> None:
    assert check_history([]).validity == "unknown"
    assert check_history([send(0, 0, 0, 10, outcome=INFO)]).validity == "unknown"
    good = check_history([send(0, 0, 0, 10)])
    assert merge([good, check_history([])]).validity == "unknown"
    assert merge([]).validity == "unknown"
    assert merge([good]).validity == "valid"


def test_many_violations_are_reported_a_few_at_a_time() -> None:
    operations = [send(at, 999 - at, at * 10, at * 10 + 5) for at in range(1000)]
    verdict = check_history(operations)
    assert 1 <= len(verdict.violations) <= REPORTED_MAX


def test_one_offset_acknowledged_twice_fills_no_other() -> None:
    rows = [send(0, 1, 0, 10), send(1, 1, 5, 20)]
    rows[1].value = rows[0].value
    expected = [queue_log.OF_NO_SEND]
    assert [violation.name for violation in check_history(rows).violations] == expected


def test_values_sent_twice_are_judged() -> None:
    """Such a queue may be undecided, and no checker breaks over it."""
    for seed in range(300):
        rng = random.Random(seed)
        rows = random_history(rng, 7)
        sends = [op for op in rows if op.f == F.SEND]
        if len(sends) < 2:
            continue
        first, again = rng.sample(sends, 2)
        for op in rows:
            op.values = tuple(first.value if v == again.value else v for v in op.values)
        again.value = first.value
        verdict = check_everything(History(RunHeader(""), rows))[0]
        assert verdict.checker == queue_log.NAME, f"seed {seed}: {verdict.reason}"
        assert "Error" not in verdict.reason, f"seed {seed}"


def test_kernel_that_breaks_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("no such offset")

    monkeypatch.setattr(MemorySource, "queues", broken)
    (verdict,) = check_everything(History(RunHeader(""), [send(0, 0, 0, 10)]))
    assert (verdict.validity, verdict.reason) == ("unknown", "IndexError: no such offset")
