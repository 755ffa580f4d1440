"""Queue locks: one holder at a time, and tokens that only grow.

A lock is a lease; each grant carries a token, the index of its log entry, and what is done under it
carries the token. A row `LOCK` that ended well is a grant or a renewal, one that failed was
refused; a logical client (`process`) is one holder.

Holding. A grant lasts until its call + lease at least, less by as much as clocks may be apart,
unless its holder called an unlock. Of two of different holders one must be able to return when the
other is over: otherwise neither can be the first. An unlock with unknown outcome ends every hold it
could end: that of its token, or every one of its process that it does not precede.

Tokens. Any row that ended well and carries token t proves that t was granted before it returned. A
row with a smaller token, called after that, must not have ended well. A renewal may keep its token;
a token of two holders, or one granted again after its unlock, fences no client off.

Every rule compares strictly, and refused or unknown rows prove nothing, so a correct history raises
no alarm. Whether a refusal was justified is not decided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "locks"

TWO_HOLDERS: Final = "two holders at once"
TOKEN_WENT_BACK: Final = "lock token went back"
TOKEN_OF_TWO: Final = "lock token of two holders"
TOKEN_AGAIN: Final = "lock token granted again"
NOT_FENCED: Final = "old lock token accepted"

LEASE_NS: Final = 60_000_000_000
"""How long a grant lasts that is neither renewed nor given back; a broker's setting."""
OPERATIONS: Final = frozenset({F.LOCK, F.UNLOCK})

Slot = tuple[str, str, int]


@dataclass(slots=True)
class _Hold:
    """A grant, and until when its holder holds at least."""

    op: Operation
    end_ns: int


def check_history(
    operations: Iterable[Operation], *, lease_ns: int = LEASE_NS, clock_error_ns: int = 0
) -> Verdict:
    """Return the verdict over the lock of every (group, queue)."""
    slots: dict[Slot, list[Operation]] = {}
    for op in operations:
        if op.f in OPERATIONS or op.token != NOTHING:
            slots.setdefault((op.group, op.topic, op.queue), []).append(op)
    found: list[Violation] = []
    grants = shown = 0
    for (group, topic, queue), rows in sorted(slots.items()):
        subject = f"{group}@{topic}/{queue}"
        granted = [op for op in rows if op.f == F.LOCK and op.outcome == Outcome.OK]
        grants += len(granted)
        shown += sum(op.f not in OPERATIONS for op in rows)
        found += _check_owners(granted, rows, subject)
        found += _check_order(rows, subject)
        found += _check_holds(_holds(granted, rows, lease_ns - clock_error_ns), subject)
    counts = {"locks": len(slots), "grants": grants, "under_lock": shown}
    return judge(NAME, found, counts, looked_at=grants)


def _check_owners(granted: list[Operation], rows: list[Operation], subject: str) -> list[Violation]:
    """A token is one holder's, and not granted again once it was given back."""
    given_back: dict[tuple[int, int], Operation] = {}
    for op in rows:
        if op.f == F.UNLOCK and op.outcome == Outcome.OK and op.token != NOTHING:
            known = given_back.setdefault((op.process, op.token), op)
            if op.ret_ns < known.ret_ns:
                given_back[op.process, op.token] = op
    found: list[Violation] = []
    owner: dict[int, Operation] = {}
    for op in granted:
        if op.token == NOTHING:
            continue
        first = owner.setdefault(op.token, op)
        back = given_back.get((op.process, op.token))
        if first.process != op.process:
            text = f"token {op.token} was granted to p{first.process} and to p{op.process}"
            found.append(violation_of(TOKEN_OF_TWO, subject, text, first, op))
        elif back is not None and back.ret_ns < op.call_ns:
            text = f"token {op.token} was given back and granted again"
            found.append(violation_of(TOKEN_AGAIN, subject, text, back, op))
    return found


def _check_order(rows: list[Operation], subject: str) -> list[Violation]:
    """No token is accepted after a greater one was."""
    accepted = [
        op for op in rows if op.token != NOTHING and op.outcome == Outcome.OK and op.f != F.UNLOCK
    ]
    returned = sorted(accepted, key=lambda op: op.ret_ns)
    newest: Operation | None = None
    at = 0
    found: list[Violation] = []
    for op in sorted(accepted, key=lambda op: op.call_ns):
        while returned[at].ret_ns < op.call_ns:  # ends at the latest with the row itself
            if newest is None or returned[at].token > newest.token:
                newest = returned[at]
            at += 1
        if newest is not None and op.token < newest.token:
            is_grant = op.f == F.LOCK
            name = TOKEN_WENT_BACK if is_grant else NOT_FENCED
            text = f"token {op.token} was {'granted' if is_grant else 'accepted'} after "
            found.append(violation_of(name, subject, f"{text}{newest.token} had been", newest, op))
    return found


class _Unlocks:
    """Unlocks of one holder: when the first of those was called that may still count."""

    def __init__(self) -> None:
        self._rows: list[Operation] = []
        self._returns: list[int] = []
        self._first_call: list[int] = []

    def take(self, op: Operation) -> None:
        self._rows.append(op)

    def close(self) -> None:
        """No more will come."""
        self._rows.sort(key=lambda op: op.ret_ns)
        self._returns = [op.ret_ns for op in self._rows]
        first = NEVER
        for op in reversed(self._rows):
            first = min(first, op.call_ns)
            self._first_call.append(first)
        self._first_call.reverse()

    def first_call(self, not_before_ns: int) -> int:
        """Return the earliest call among those that had not returned before *not_before_ns*."""
        at = bisect_left(self._returns, not_before_ns)
        return self._first_call[at] if at < len(self._first_call) else NEVER


def _holds(granted: list[Operation], rows: list[Operation], lease_ns: int) -> list[_Hold]:
    of_token: dict[tuple[int, int], _Unlocks] = {}
    of_process: dict[int, _Unlocks] = {}
    for op in rows:
        if op.f == F.UNLOCK and op.outcome != Outcome.FAIL:
            of_token.setdefault((op.process, op.token), _Unlocks()).take(op)
            of_process.setdefault(op.process, _Unlocks()).take(op)
    for unlocks in (*of_token.values(), *of_process.values()):
        unlocks.close()
    holds: list[_Hold] = []
    for op in granted:
        may_end = (
            [of_process.get(op.process)]
            if op.token == NOTHING
            else [of_token.get((op.process, op.token)), of_token.get((op.process, NOTHING))]
        )
        calls = [unlocks.first_call(op.call_ns) for unlocks in may_end if unlocks is not None]
        end_ns = min(op.call_ns + lease_ns, *calls, NEVER)
        holds.append(_Hold(op, max(op.call_ns, end_ns)))
    return holds


class _LastEnd:
    """The hold that ends last, and the one that ends last among those of other holders."""

    def __init__(self) -> None:
        self._first: _Hold | None = None
        self._second: _Hold | None = None

    def take(self, hold: _Hold) -> None:
        if self._first is None or self._first.op.process == hold.op.process:
            if self._first is None or hold.end_ns > self._first.end_ns:
                self._first = hold
        elif hold.end_ns > self._first.end_ns:
            self._first, self._second = hold, self._first
        elif self._second is None or hold.end_ns > self._second.end_ns:
            self._second = hold

    def besides(self, process: int) -> _Hold | None:
        """Return the hold that ends last and is not of *process*."""
        first = self._first
        return self._second if first is not None and first.op.process == process else first


def _check_holds(holds: list[_Hold], subject: str) -> list[Violation]:
    """Compare each hold with those that return no later, and before it is over."""

    def limit(hold: _Hold) -> int:
        return min(hold.op.ret_ns, hold.end_ns - 1)

    found: dict[frozenset[int], Violation] = {}
    by_return = sorted(holds, key=lambda hold: hold.op.ret_ns)
    last, at = _LastEnd(), 0
    for hold in sorted(holds, key=limit):
        while at < len(holds) and by_return[at].op.ret_ns <= limit(hold):
            last.take(by_return[at])
            at += 1
        op, other = hold.op, last.besides(hold.op.process)
        if other is not None and other.end_ns > op.ret_ns:
            until = f"while p{other.op.process} held it until {other.end_ns} ns"
            text = f"p{op.process} got the lock {until}"
            violation = violation_of(TWO_HOLDERS, subject, text, other.op, op)
            found.setdefault(frozenset(violation.operations), violation)
    return list(found.values())
