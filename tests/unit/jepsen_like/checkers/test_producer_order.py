"""Sends of one producer stand in their order, those of unknown outcome included."""

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything
from dledger.jepsen_like.checkers.producer_order import NAME, OVERTAKEN
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import (
    CLIENT_BITS,
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.judged import judged
from tests.harness.rows import row


def check_history(history: History) -> Verdict:
    return judged(NAME, history, settled=bool(history.replica_reads), idempotent=True)


def send(
    op_id: int, producer: int, number: int, off: int = NOTHING, due_ns: int = NOTHING
) -> Operation:
    outcome = Outcome.OK if off != NOTHING else Outcome.INFO
    fields = {"process": producer, "outcome": outcome, "off": off, "due_ns": due_ns}
    at = op_id * 10
    return row(op_id, F.SEND, at, at + 5, topic="T", value=value(producer, number), **fields)


def value(producer: int, number: int) -> int:
    return producer << CLIENT_BITS | number


def history(*sends: Operation, stored: tuple[int, ...] = ()) -> History:
    read = ReplicaRead(999, "n1", "T", 0, 0, stored)
    return History(RunHeader("run"), list(sends), [], [read] if stored else [])


def test_what_is_in_order_is_valid() -> None:
    verdict = check_history(history(send(1, 1, 1, 0), send(2, 2, 1, 1), send(3, 1, 2, 2)))
    assert verdict.is_valid
    assert verdict.counts == {"producers": 2, "stored": 3}


def test_an_unknown_send_that_comes_after_a_later_one_is_found() -> None:
    stored = (value(1, 2), value(2, 1), value(1, 1))
    verdict = check_history(
        history(send(1, 1, 1), send(2, 1, 2, 0), send(3, 2, 1, 1), stored=stored)
    )
    (violation,) = verdict.violations
    assert violation.name == OVERTAKEN
    assert violation.operations == (1, 2)
    assert "they stand at 2 and 0" in violation.detail


def test_producers_are_not_compared_with_each_other() -> None:
    stored = (value(2, 1), value(1, 1))
    assert check_history(history(send(1, 1, 1), send(2, 2, 1), stored=stored)).is_valid


def test_delayed_messages_come_when_they_are_due() -> None:
    stored = (value(1, 2), value(1, 1))
    late = send(1, 1, 1, due_ns=500)
    assert check_history(history(late, send(2, 1, 2), stored=stored)).is_valid


def test_nothing_stored_proves_nothing() -> None:
    assert check_history(history(send(1, 1, 1))).validity == "unknown"


def test_it_is_asked_for_idempotent_producers_only() -> None:
    played = history(send(1, 1, 1, 0))
    names = {verdict.checker for verdict in check_everything(played)}
    assert "producer_order" not in names
    assert "producer_order" in {
        v.checker for v in check_everything(played, Settings(settled=True, idempotent=True))
    }
