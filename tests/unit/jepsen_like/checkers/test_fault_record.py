"""Groups that acknowledge early: what they may lose, and what they may not."""

from __future__ import annotations

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.fault_record import Faults, with_late_effect
from dledger.jepsen_like.checkers.kernel.tables import MemorySource
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Event,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.rows import row

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
