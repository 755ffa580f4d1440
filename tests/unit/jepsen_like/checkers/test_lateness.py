"""A delayed message has a latest time: due, a bound, and the time in which something was wrong."""

from dledger.jepsen_like.checkers import delayed
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything
from dledger.jepsen_like.checkers.fault_record import SERVED, recovers_within_ns
from dledger.jepsen_like.history.operation import (
    NOTHING,
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)

MS = 1_000_000
S = 1_000 * MS


def row(op_id: int, f: F, at_ms: int, for_ms: int = 1) -> Operation:
    at = at_ms * MS
    return Operation(op_id, op_id, 1, NOTHING, f, Outcome.OK, at, at + for_ms * MS, "t", 0)


def history_at(missed_s: int, *events: Event) -> History:
    """A message that is due at 11 s, and a read at *missed_s* that does not find it."""
    send, missed, seen = row(0, F.SEND, 0), row(1, F.MAX_OFFSET, 1000 * missed_s), row(2, F.PULL, 0)
    send.value, send.due_ns, send.ret_ns = 100, 10 * S, 1 * S
    missed.max_off = 0
    seen.call_ns = seen.ret_ns = missed.ret_ns + 200 * S
    seen.off, seen.cnt, seen.values = 0, 1, (100,)
    served_ns = seen.ret_ns + S
    return History(RunHeader("r"), [send, missed, seen], [*events, Event(served_ns, 0, SERVED)])


def late(history: History, bound_s: int | None = 5) -> list[tuple[int, ...]]:
    bound_ns = None if bound_s is None else bound_s * S
    found = check_everything(history, Settings(settled=False, late_quiet_max_ns=bound_ns))
    (verdict,) = (verdict for verdict in found if verdict.checker == delayed.NAME)
    assert {violation.name for violation in verdict.violations} <= {delayed.LATE}
    return [violation.operations for violation in verdict.violations]


def test_lateness_without_a_fault_counts_from_the_due_time() -> None:
    assert late(history_at(17)) == [(0, 1)]
    assert late(history_at(16)) == []
    assert late(history_at(17), None) == []


def test_lateness_leaves_out_what_a_fault_takes() -> None:
    fault = Event(12 * S, 20 * S, "kill", "leader", "n0")
    well_s = 20 + recovers_within_ns("kill") // S
    assert late(history_at(well_s + 4, fault)) == []
    assert late(history_at(well_s + 5, fault)) == [(0, 1)]


def test_lateness_is_not_judged_without_a_record_of_faults() -> None:
    history = history_at(17)
    history.events = []
    assert late(history) == []
