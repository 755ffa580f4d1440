"""Quotas: no more is acknowledged than they allow, and none refused while they are not spent.

A `LIMITED` row is a send of the client *group*, once: *cnt* messages, of values from *value* on, in
a body of *min_off* bytes, to the broker process *txn*. A `QUOTA` row changes the quota of that
client, to *cnt* messages and *off* bytes a second; *status* names both (`Row`, `Act`). No other
client counts under it, and its changes follow each other. After a change of unknown outcome nothing
is known of its quota, and nothing is judged.

Each process counts for itself and forgets when it ends, so sends to one process are taken together,
and no fault needs to be known. A change counts from the next request on: sends that were called
after its answer, and answered before the next change was called, were counted under it.

- *Above*. The time of a bucket moves on by the cost over the rate, from no further back than
  `BURST_NS`, and an answer waits for it. So of sends called at *a* or later, and answered at *b* or
  earlier, the cost is at most rate * (b - a + `BURST_NS`). One that takes more than two seconds of
  the quota may pass out of turn, and is left out.
- *Refused*. A send is refused when it would wait longer than `DELAY_NS`. For that, other sends
  must have moved the time on: those that may have passed between some instant and the refusal
  cost more than rate * (time between + `BURST_NS` + `DELAY_NS`). The answer is held for `DELAY_NS`,
  so the refusal was decided that long before it. A send of unknown outcome may have passed whenever
  that helps. Behind a change the bucket may begin without its burst, not with debts.
  A leader that was deposed, and does not know it, refuses by an old quota: one counts as certain
  only where that process has answered something that it could not have without it.

Brokers count by a clock that no date moves, but it may be fast or slow: by *pace_error_ns* at most
in the whole run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from enum import IntEnum, unique
from typing import Final, NamedTuple

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    QUOTA_EXCEEDED,
    F,
    Operation,
    Outcome,
)

NAME: Final = "quotas"

ABOVE: Final = "more acknowledged than the quota allows"
UNSPENT: Final = "send refused though the quota was not spent"
HASTY: Final = "send refused by quota too early"
STORED: Final = "refused limited send stored"
LOST: Final = "acknowledged limited send lost"
TWICE: Final = "limited send stored twice"
OTHERWISE: Final = "quota stands otherwise than it was set"

OPERATIONS: Final = frozenset({F.LIMITED, F.QUOTA})
REPORTED_MAX: Final = 8
S: Final = 1_000_000_000
BURST_NS: Final = S
"""A client may use a quota of so long at once."""
DELAY_NS: Final = S
"""What would wait longer is refused, after so long."""


@unique
class Row(IntEnum):
    """What a row of sends is."""

    SEND = 0
    FOUND = 1
    """A message that was there when the run was over."""
    END = 2
    """All queues were read; *cnt* is 1 where they had their beginning."""


@unique
class Act(IntEnum):
    """What a row of quotas is."""

    PUT = 0
    DELETE = 1
    LISTED = 2
    """One that was there when the run was over; the row without *group*: the list was read."""


class _Quota(NamedTuple):
    """A quota, and when the change to it was called and answered."""

    messages: int
    size_bytes: int
    call_ns: int
    ret_ns: int

    @property
    def limits(self) -> tuple[int, int]:
        """Of messages and of bytes; 0: none."""
        return self.messages, self.size_bytes


_NONE: Final = _Quota(0, 0, NOTHING, NOTHING)


class _Client:
    """A client and its quotas, one after the other, up to a change of unknown outcome."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.quotas = [_NONE]
        self.newest: Operation | None = None
        self.until_ns = NEVER
        self.sends: list[Operation] = []
        self.known: dict[int, list[tuple[int, int]]] = {}
        """Process → up to which quota it certainly knows them, and since when, in order."""

    def change(self, op: Operation) -> None:
        """Note a change that was called."""
        if self.until_ns != NEVER or op.outcome == Outcome.FAIL:
            return
        if op.outcome == Outcome.INFO:
            self.until_ns = op.call_ns
            return
        limits = (op.cnt, max(op.off, 0)) if op.status == Act.PUT else (0, 0)
        self.quotas.append(_Quota(*limits, op.call_ns, op.ret_ns))
        self.newest = op
        self.known.setdefault(op.txn, []).append((op.ret_ns, len(self.quotas) - 1))

    def note_known(self) -> None:
        """Note what processes know, by what they acknowledged."""
        for op in self.sends:
            if op.outcome == Outcome.OK:
                certain = (op.ret_ns, self.before(op.call_ns))
                self.known.setdefault(op.txn, []).append(certain)
        for process, since in self.known.items():
            newest, rising = 0, []
            for at_ns, quota in sorted(since):
                newest = max(newest, quota)
                rising.append((at_ns, newest))
            self.known[process] = rising

    def before(self, at_ns: int) -> int:
        """Return the newest quota that was answered at an instant."""
        return bisect_right([quota.ret_ns for quota in self.quotas], at_ns) - 1

    def called(self, at_ns: int) -> int:
        """Return the newest quota that was called at an instant."""
        return bisect_right([quota.call_ns for quota in self.quotas], at_ns) - 1

    def known_by(self, process: int, at_ns: int) -> int:
        """Return the newest quota that a process certainly knew at an instant."""
        since = self.known.get(process, [])
        at = bisect_right(since, (at_ns, len(self.quotas)))
        return since[at - 1][1] if at else 0


def check_history(
    operations: Iterable[Operation], *, pace_error_ns: int = 0, drained: bool = True
) -> Verdict:
    """Return the verdict over all clients with a quota of their own, and those beside them.

    Args:
        pace_error_ns: How far a broker's clock may have run ahead or behind in the whole run.
        drained: The run ended with a read of everything.
    """
    rows = sorted((op for op in operations if op.f in OPERATIONS), key=lambda op: op.op_id)
    clients: dict[str, _Client] = {}
    for op in rows:
        is_listed = op.f == F.QUOTA and op.status == Act.LISTED
        if is_listed or (op.f == F.LIMITED and op.status != Row.SEND):
            continue
        client = clients.setdefault(op.group, _Client(op.group))
        if op.f == F.QUOTA:
            client.change(op)
        else:
            client.sends.append(op)
    violations: list[Violation] = []
    acknowledged = refused = 0
    for client in clients.values():
        client.note_known()
        judged = _certain(client)
        acknowledged += sum(map(len, judged.values()))
        for (_, number), sends in judged.items():
            violations += _above(client.quotas[number], sends, pace_error_ns)
        refusals = [op for op in client.sends if op.err == QUOTA_EXCEEDED]
        refused += len(refusals)
        for op in refusals:
            violations += _refused(client, op, pace_error_ns)
    violations += _stored(rows, is_drained=drained)
    if drained:
        violations += _listed(rows, clients)
    violations.sort(key=lambda violation: (violation.at_ns, violation.operations, violation.name))
    counts = {
        "clients": len(clients),
        "changes": sum(len(client.quotas) - 1 for client in clients.values()),
        "acknowledged": acknowledged,
        "refused": refused,
    }
    return judge(NAME, violations[:REPORTED_MAX], counts, looked_at=acknowledged + refused)


def _certain(client: _Client) -> dict[tuple[int, int], list[Operation]]:
    """Return the acknowledged sends by their process and the quota they were counted under."""
    found: dict[tuple[int, int], list[Operation]] = {}
    for op in client.sends:
        if op.outcome != Outcome.OK or op.ret_ns >= client.until_ns:
            continue
        number = client.before(op.call_ns)
        if number == client.called(op.ret_ns) and any(client.quotas[number].limits):
            found.setdefault((op.txn, number), []).append(op)
    return found


def _costs(op: Operation) -> tuple[int, int]:
    return op.cnt, op.min_off


def _above(quota: _Quota, sends: list[Operation], error_ns: int) -> Iterator[Violation]:
    for which, (limit, unit) in enumerate(zip(quota.limits, ("messages", "bytes"), strict=True)):
        if not limit:
            continue
        counted = [op for op in sends if _costs(op)[which] * S <= limit * (BURST_NS + DELAY_NS)]
        counted.sort(key=lambda op: (op.ret_ns, op.op_id))
        for first in sorted(counted, key=lambda op: (op.call_ns, op.op_id)):
            total = 0
            for op in counted:
                if op.call_ns < first.call_ns:
                    continue
                total += _costs(op)[which]
                took_ns = op.ret_ns - first.call_ns
                if total * S > limit * (took_ns + BURST_NS + error_ns):
                    text = f"{total} {unit} in {took_ns / S:.3f} s, at {limit} a second"
                    yield _violation(ABOVE, first, text, op)
                    return


def _refused(client: _Client, op: Operation, error_ns: int) -> Iterator[Violation]:
    if op.ret_ns - op.call_ns < DELAY_NS - error_ns:
        yield _violation(HASTY, op, f"after {(op.ret_ns - op.call_ns) / S:.3f} s")
    if op.ret_ns >= client.until_ns:
        return
    by_ns = max(op.call_ns, op.ret_ns - DELAY_NS + error_ns)
    low, high = client.known_by(op.txn, op.call_ns), client.called(by_ns)
    for number in range(low, high + 1):
        if _may_refuse(client, number, op, by_ns, error_ns):
            return
    quota = client.quotas[high]
    text = f"at {quota.messages} messages and {quota.size_bytes} bytes a second; 0: without limit"
    yield _violation(UNSPENT, op, text, client.newest if high else None)


def _may_refuse(
    client: _Client, number: int, refusal: Operation, by_ns: int, error_ns: int
) -> bool:
    """Whether a process may have refused under a quota, at *by_ns* at the latest."""
    quota = client.quotas[number]
    alike = next(each for each in client.quotas if each.limits == quota.limits)
    others = [op for op in client.sends if _may_have_passed(op, refusal, alike.call_ns, by_ns)]
    others.sort(key=lambda op: -op.ret_ns)
    follows = any(any(each.limits) for each in client.quotas[:number])
    for which, limit in enumerate(quota.limits):
        if not limit:
            continue
        total = _costs(refusal)[which]
        if total * S > limit * (BURST_NS + DELAY_NS - error_ns):
            return True
        for op in others:
            total += _costs(op)[which]
            since_ns = max(0, refusal.call_ns - op.ret_ns)
            if total * S > limit * (since_ns + BURST_NS + DELAY_NS - error_ns):
                return True
        if follows:
            total = _costs(refusal)[which]
            total += sum(_costs(op)[which] for op in others if op.ret_ns >= quota.call_ns)
            since_ns = refusal.call_ns - _first_ns(client, quota, refusal)
            if total * S > limit * (since_ns + DELAY_NS - error_ns):
                return True
    return False


def _may_have_passed(op: Operation, refusal: Operation, from_ns: int, by_ns: int) -> bool:
    return (
        op is not refusal
        and op.txn in (refusal.txn, NOTHING)
        and op.err != QUOTA_EXCEEDED
        and op.call_ns <= by_ns
        and op.ret_ns >= from_ns
    )


def _first_ns(client: _Client, quota: _Quota, refusal: Operation) -> int:
    """Return when, at the latest, a process had first counted under a quota."""
    certain = (
        op.ret_ns
        for op in client.sends
        if op.txn == refusal.txn
        and op.call_ns >= quota.ret_ns
        and (op.outcome == Outcome.OK or op.err == QUOTA_EXCEEDED)
    )
    return min(refusal.call_ns, *certain)


def _stored(rows: list[Operation], *, is_drained: bool) -> Iterator[Violation]:
    places: dict[int, set[tuple[int, int]]] = {}
    is_whole = False
    for op in rows:
        if op.f == F.LIMITED and op.status == Row.FOUND:
            places.setdefault(op.value, set()).add((op.queue, op.off))
        elif op.f == F.LIMITED and op.status == Row.END:
            is_whole = is_drained and bool(op.cnt)
    for op in rows:
        if op.f != F.LIMITED or op.status != Row.SEND:
            continue
        for value in range(op.value, op.value + op.cnt):
            where = places.get(value, set())
            if op.outcome == Outcome.FAIL and where:
                yield _violation(STORED, op, f"value {value} is at {min(where)}")
            elif len(where) > 1:
                yield _violation(TWICE, op, f"value {value} is at {sorted(where)}")
            elif op.outcome == Outcome.OK and is_whole and not where:
                yield _violation(LOST, op, f"value {value} is not there")


def _listed(rows: list[Operation], clients: dict[str, _Client]) -> Iterator[Violation]:
    listed = {op.group: op for op in rows if op.f == F.QUOTA and op.status == Act.LISTED}
    end = listed.get("")
    if end is None or end.outcome != Outcome.OK:
        return
    for client in clients.values():
        change = client.newest
        if client.until_ns != NEVER or change is None:
            continue
        row = listed.get(client.name)
        found = None if row is None else (row.cnt, max(row.off, 0))
        wanted = client.quotas[-1].limits if change.status == Act.PUT else None
        if found != wanted:
            text = f"{found} messages and bytes a second, not {wanted}; None: no quota"
            yield _violation(OTHERWISE, change, text, row)


def _violation(name: str, op: Operation, text: str, other: Operation | None = None) -> Violation:
    ids = (op.op_id,) if other is None else (op.op_id, other.op_id)
    return Violation(name, op.group, text, ids, at_ns=op.call_ns)
