"""Delayed messages, replicas and the multiset: a clean history, and each anomaly planted in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import delayed, replicas, total_queue
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.verdict import Verdict, merge
from dledger.jepsen_like.history.operation import (
    NEVER,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
)
from tests.harness.judged import judged

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
