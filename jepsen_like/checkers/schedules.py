"""Repeated schedules: each instant has one message at most, none has a message without a right to.

A `SCHEDULE` row puts, changes, pauses, resumes or removes the schedule *group*; *status* names
which (`Act`). A put has the model of its instants: every *off* ms, *min_off* among them (not known:
a grid of its own), up to *max_off*, none before *min_off* where *cnt* is 1, in the queue *queue*
where one was asked for; *txn* is the first put of this course of the name, *due_ns* the history's
clock at 1970. One client acts on a name, one step after the other.

A `FIRED` row is a message that was found: for the instant *min_off*, of the put *txn*, with *cnt*
instants missed before it, made at *max_off* by the date of its leader. One without a group ends the
last reading: *cnt* is 1 where it began at the beginning.

What is not certain proves nothing: from a step of unknown outcome on, a course is judged only by
what holds for any order of its steps. Between the call and the return of a step both states are
right, and on both sides of it as much time as clocks may be apart. Where nothing was wrong for long
around an instant it has its message; where something was, the newest instant before quiet times has
one, or an instant behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, unique
from itertools import pairwise
from typing import Final

from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING, SCHEDULE_ABSENT, F, Operation, Outcome

NAME: Final = "schedules"

TWICE: Final = "instant with two messages"
NO_INSTANT: Final = "message for no instant of its schedule"
STRANGER: Final = "message of no schedule"
EARLY: Final = "message before its instant"
OVERTAKEN: Final = "instant sent though a newer one had come"
BEFORE: Final = "instant from before its schedule"
REMOVED: Final = "message of a removed schedule"
PAUSED: Final = "message for an instant of a pause"
REPLACED: Final = "message of what was replaced"
ELSEWHERE: Final = "message in another queue than its schedule's"
SKIPPED: Final = "instant without its message"
SILENT: Final = "schedule without a message"
MISCOUNTED: Final = "missed instants counted otherwise"
ABSENT: Final = "schedule that was put is absent"
THERE: Final = "schedule that was removed is there"
STANDS_OTHERWISE: Final = "schedule stands otherwise than its messages"

OPERATIONS: Final = frozenset({F.SCHEDULE, F.FIRED})
REPORTED_MAX: Final = 8

WITHIN_NS: Final = 5_000_000_000
"""A message is sent within this after its instant, while nothing is wrong."""
ALIKE: Final = 2
"""A clock error of more than one part in this of an interval makes no instant certain."""
COUNTED_MAX: Final = 200
"""Missed instants of a cron expression are counted up to here."""
MINUTE_MS: Final = 60_000
MS: Final = 1_000_000


@unique
class Act(IntEnum):
    """What a step does."""

    PUT = 0
    """With times that are new: instants count from there."""
    MESSAGE = 1
    """With another message or queue alone."""
    AGAIN = 2
    """As it was: nothing changes."""
    PAUSE = 3
    RESUME = 4
    REMOVE = 5
    LISTED = 6
    """What the broker shows at the end: *cnt* messages, the newest for *max_off*, *queue* 1 where
    it is paused. One without a group ends all."""


@dataclass(slots=True)
class _State:
    """What a course certainly is, from one step to the next.

    Attributes:
        put: The newest put, whose message is sent.
        times: The put whose instants count.
        from_ns, to_ns: Return of the step that made it so, and call of the next one.
    """

    put: Operation
    times: Operation
    is_paused: bool
    is_removed: bool
    from_ns: int
    to_ns: int


@dataclass(slots=True)
class _Course:
    """A name, from a put to its removal."""

    name: str
    steps: list[Operation] = field(default_factory=list)
    puts: dict[int, Operation] = field(default_factory=dict)
    fired: list[Operation] = field(default_factory=list)
    """Of each place the look that came first."""
    states: list[_State] = field(default_factory=list)
    loose_ns: int | None = None
    """Call of the first step of unknown outcome."""


def check_history(
    operations: Iterable[Operation],
    *,
    clock_error_ns: int = 0,
    drained: bool = True,
    record: FaultRecord | None = None,
) -> Verdict:
    """Return the verdict over all schedules of a history.

    Args:
        clock_error_ns: How far brokers' dates may be from the history's clock.
        drained: The run ended with a reading of everything.
        record: Of the faults of the run; None: no message is demanded.
    """
    rows = sorted((op for op in operations if op.f in OPERATIONS), key=lambda op: op.op_id)
    run = _Run(rows, clock_error_ns, record, drained=drained)
    found: list[Violation] = list(run.strangers)
    for course in run.courses.values():
        found += run.judged(course)
    found.sort(key=lambda violation: (violation.at_ns, violation.operations, violation.name))
    counts = {
        "steps": sum(len(course.steps) for course in run.courses.values()),
        "schedules": len(run.courses),
        "messages": sum(len(course.fired) for course in run.courses.values()),
        "demanded": run.demanded,
        "certain": run.certain,
    }
    return judge(NAME, found[:REPORTED_MAX], counts, looked_at=counts["messages"])


class _Run:
    """The rows of a run, by course."""

    def __init__(
        self,
        rows: list[Operation],
        clock_error_ns: int,
        record: FaultRecord | None,
        *,
        drained: bool,
    ) -> None:
        self.error_ns = clock_error_ns
        self.record = record
        self.courses: dict[int, _Course] = {}
        self.strangers: list[Violation] = []
        self.demanded = self.certain = 0
        self.zero_ns = 0
        steps = [op for op in rows if op.f == F.SCHEDULE and op.status != Act.LISTED]
        listed = [op for op in rows if op.f == F.SCHEDULE and op.status == Act.LISTED]
        self.listed: Mapping[str, Operation] = {op.group: op for op in listed}
        self.end = self.listed.get("")
        course_of: dict[int, _Course] = {}
        for op in steps:
            course = self.courses.setdefault(op.txn, _Course(op.group))
            course.steps.append(op)
            if op.status in (Act.PUT, Act.MESSAGE):
                self.zero_ns = op.due_ns
                course.puts[op.op_id] = op
                course_of[op.op_id] = course
        first: dict[tuple[str, int, int], Operation] = {}
        self.is_whole = False
        for op in (op for op in rows if op.f == F.FIRED):
            if not op.group:
                self.is_whole = drained and bool(op.cnt)
                continue
            place = (op.topic, op.queue, op.off)
            known = first.get(place)
            if known is None or op.ret_ns < known.ret_ns:
                first[place] = op
        for _, op in sorted(first.items()):
            one = course_of.get(op.txn)
            if one is None or one.name != op.group or one.puts[op.txn].outcome == Outcome.FAIL:
                self.strangers.append(self._violation(STRANGER, op, "no step has put it"))
            else:
                one.fired.append(op)
        for course in self.courses.values():
            course.fired.sort(key=lambda op: (op.min_off, op.op_id))
            self._follow(course)

    def due_ns(self, instant_ms: int) -> int:
        """Return an instant on the history's clock."""
        return self.zero_ns + instant_ms * MS

    def _follow(self, course: _Course) -> None:
        """Note what the course certainly is after each step, up to the first unknown one."""
        for op in course.steps:
            before = course.states[-1] if course.states else None
            if before is not None:
                before.to_ns = min(before.to_ns, op.call_ns)
            if op.outcome == Outcome.INFO:
                course.loose_ns = op.call_ns
                return
            if op.outcome == Outcome.FAIL:
                if before is not None and op.err != SCHEDULE_ABSENT:
                    before = _State(*_known(before), op.ret_ns, self._end_ns())
                    course.states.append(before)
                continue
            after = _after(before, op, self._end_ns())
            if after is not None:
                course.states.append(after)

    def _end_ns(self) -> int:
        return 0 if self.end is None else self.end.call_ns

    # -- a course ----------------------------------------------------------------------------

    def judged(self, course: _Course) -> Iterator[Violation]:
        """Yield what is wrong with a course."""
        yield from self._twice(course)
        for op in course.fired:
            yield from self._unrightful(course, op)
        if self.is_whole and self.end is not None:
            yield from self._demands(course)
            yield from self._counts(course)
            yield from self._listed(course)
        for op in course.steps:
            is_absent = op.err == SCHEDULE_ABSENT and op.outcome == Outcome.FAIL
            if is_absent and (course.loose_ns is None or op.call_ns < course.loose_ns):
                yield self._violation(ABSENT, op, "its broker group does not know it")

    def _twice(self, course: _Course) -> Iterator[Violation]:
        for one, other in pairwise(course.fired):
            if one.min_off == other.min_off:
                text = f"{_at(one)} and {_at(other)} are both for {one.min_off}"
                yield self._violation(TWICE, other, text, one)

    def _unrightful(self, course: _Course, op: Operation) -> Iterator[Violation]:
        """Yield what a message has no right to."""
        put, due_ns = course.puts[op.txn], self.due_ns(op.min_off)
        times = self._times_of(course, put)
        if not self._is_instant(course, times, op.min_off):
            text = f"{op.min_off} is none of every {times.off} ms from {times.min_off} on"
            yield self._violation(NO_INSTANT, op, text, put)
        if op.ret_ns < due_ns - self.error_ns:
            text = f"was seen {(due_ns - op.ret_ns) / 1e6:.1f} ms before its instant"
            yield self._violation(EARLY, op, text, put)
        elif op.max_off < op.min_off:
            text = f"its leader made it {op.min_off - op.max_off} ms before its instant"
            yield self._violation(EARLY, op, text, put)
        newer_ms = op.min_off + times.off
        if op.max_off >= newer_ms and not NOTHING < times.max_off < newer_ms:
            text = f"its leader made it {op.max_off - newer_ms} ms after the next instant"
            yield self._violation(OVERTAKEN, op, text, put)
        if put.queue not in (NOTHING, op.queue):
            yield self._violation(ELSEWHERE, op, f"is at {_at(op)}, not in {put.queue}", put)
        if put.status == Act.PUT and due_ns < put.call_ns - self.error_ns:
            text = f"its instant was {(put.call_ns - due_ns) / 1e6:.1f} ms before"
            yield self._violation(BEFORE, op, text, put)
        for state in course.states:
            if not state.from_ns + self.error_ns < due_ns:
                break
            is_within = due_ns < state.to_ns - self.error_ns
            if state.is_removed and course.loose_ns is None:
                yield self._violation(REMOVED, op, "its instant came after the removal", put)
            elif is_within and state.is_paused:
                yield self._violation(PAUSED, op, "its instant came in a pause", put)
            elif op.txn != state.put.op_id and op.txn < state.put.op_id:
                text = f"its instant came after operation {state.put.op_id} was answered"
                yield self._violation(REPLACED, op, text, put)
            else:
                continue
            return

    def _times_of(self, course: _Course, put: Operation) -> Operation:
        """Return the put that gave the times of *put*'s message."""
        times = put
        for op_id, one in course.puts.items():
            if op_id <= put.op_id and one.status == Act.PUT:
                times = one
        return times

    def _is_instant(self, course: _Course, times: Operation, ms: int) -> bool:
        begin_ms = times.min_off
        if begin_ms == NOTHING:  # of an unknown outcome: any grid, and all on the same one
            grid = [
                op for op in course.fired if self._times_of(course, course.puts[op.txn]) is times
            ]
            begin_ms = grid[0].min_off
        is_before = bool(times.cnt) and ms < begin_ms
        is_behind = times.max_off != NOTHING and ms > times.max_off
        return (ms - begin_ms) % times.off == 0 and not (is_before or is_behind)

    # -- what must be there ----------------------------------------------------------------

    def _demands(self, course: _Course) -> Iterator[Violation]:
        if self.record is None:
            return
        fired = [op.min_off for op in course.fired]
        for state, until_ns in _active(course.states):
            for ms in self._instants(state, until_ns):
                due_ns = self.due_ns(ms)
                last_ns = self._sent_within(due_ns, until_ns)
                if last_ns is None:
                    break
                self.demanded += 1
                at = bisect_left(fired, ms)
                is_sent = at < len(fired) and fired[at] == ms
                if at == len(fired) or self.due_ns(fired[at]) > last_ns:
                    text = f"neither {ms} nor an instant up to {(last_ns - due_ns) / 1e9:.1f} s"
                    text += " later has a message"
                    yield self._violation(SILENT, state.put, f"{course.name}: {text}")
                    break
                if self._is_certain(state, due_ns):
                    self.certain += 1
                    if not is_sent:
                        text = f"{course.name}: {ms} has no message, though nothing was wrong"
                        yield self._violation(SKIPPED, state.put, text, course.fired[at])
                        break

    def _instants(self, state: _State, until_ns: int) -> Iterator[int]:
        """Yield the instants that certainly come in the time of a state."""
        times = state.times
        if times.min_off == NOTHING:
            return
        from_ms = max(0, state.from_ns + self.error_ns - self.zero_ns) // MS + 1
        steps = max(0, -(-(from_ms - times.min_off) // times.off))
        ms = times.min_off + steps * times.off
        while self.due_ns(ms) < until_ns and (times.max_off == NOTHING or ms <= times.max_off):
            yield ms
            ms += times.off

    def _sent_within(self, due_ns: int, until_ns: int) -> int | None:
        """Return until when an instant, or one behind it, is sent; None: nothing states so."""
        assert self.record is not None
        needed_ns = WITHIN_NS + self.error_ns
        for begin, end in self.record.quiet(due_ns, until_ns):
            if end - begin >= needed_ns:
                return begin + needed_ns
        return None

    def _is_certain(self, state: _State, due_ns: int) -> bool:
        """Whether nothing around an instant lets it be missed."""
        assert self.record is not None
        around = (due_ns - WITHIN_NS - self.error_ns, due_ns + WITHIN_NS + self.error_ns)
        return (
            self.error_ns * ALIKE < state.times.off * MS
            and around[0] > state.from_ns
            and self.record.quiet(*around) == [around]
        )

    def _counts(self, course: _Course) -> Iterator[Violation]:
        """Compare what messages state of instants without one with the instants between them."""
        steps = [
            op
            for op in course.steps
            if op.status not in (Act.MESSAGE, Act.AGAIN) and op.outcome != Outcome.FAIL
        ]
        if course.loose_ns is not None:
            return
        for one, other in pairwise(course.fired):
            times = self._times_of(course, course.puts[one.txn])
            is_same = times is self._times_of(course, course.puts[other.txn])
            begin_ns = self.due_ns(one.min_off) - self.error_ns
            changes = any(op.call_ns <= other.ret_ns and op.ret_ns >= begin_ns for op in steps)
            if not is_same or changes or one.min_off == other.min_off:
                continue
            missed = (other.min_off - one.min_off) // times.off - 1
            if times.off == MINUTE_MS:
                missed = min(missed, COUNTED_MAX)
            if other.cnt != missed:
                text = f"{other.cnt} between {one.min_off} and {other.min_off}, not {missed}"
                yield self._violation(MISCOUNTED, other, text, one)

    def _listed(self, course: _Course) -> Iterator[Violation]:
        if course.loose_ns is not None or not course.states:
            return
        last, row = course.states[-1], self.listed.get(course.name)
        is_newest = course is [one for one in self.courses.values() if one.name == course.name][-1]
        if not is_newest:
            return
        if last.is_removed:
            if row is not None:
                yield self._violation(THERE, row, "it was removed", course.steps[-1])
            return
        if row is None:
            yield self._violation(ABSENT, course.steps[-1], "it is not in the list of the end")
            return
        sent = [op for op in course.fired if op.min_off <= row.max_off]
        newest = max((op.min_off for op in sent), default=0)
        if (row.cnt, max(row.max_off, 0), bool(row.queue)) != (len(sent), newest, last.is_paused):
            text = f"{row.cnt} messages up to {row.max_off}, paused {bool(row.queue)}; found"
            text += f" {len(sent)} up to {newest}, paused {last.is_paused}"
            yield self._violation(STANDS_OTHERWISE, row, text)

    def _violation(
        self, name: str, op: Operation, text: str, other: Operation | None = None
    ) -> Violation:
        about = f"{op.group}: {text}" if op.group and not text.startswith(op.group) else text
        ids = (op.op_id,) if other is None else (op.op_id, other.op_id)
        return Violation(name, op.topic, about, ids, at_ns=op.call_ns)


def _after(before: _State | None, op: Operation, end_ns: int) -> _State | None:
    """Return what a course is after a step that was done."""
    if op.status == Act.PUT:
        is_paused = before is not None and before.is_paused
        return _State(op, op, is_paused, False, op.ret_ns, end_ns)
    if before is None:
        return None
    put, times, is_paused, is_removed = _known(before)
    match op.status:
        case Act.MESSAGE:
            put = op
        case Act.PAUSE:
            is_paused = True
        case Act.RESUME:
            is_paused = False
        case Act.REMOVE:
            is_removed = True
    return _State(put, times, is_paused, is_removed, op.ret_ns, end_ns)


def _known(state: _State) -> tuple[Operation, Operation, bool, bool]:
    return state.put, state.times, state.is_paused, state.is_removed


def _active(states: list[_State]) -> Iterator[tuple[_State, int]]:
    """Yield each time without a pause in which instants stay the same, as its begin and its end."""
    at = 0
    while at < len(states):
        state, end = states[at], at
        if state.is_paused or state.is_removed:
            at += 1
            continue
        while end + 1 < len(states) and _goes_on(state, states[end + 1]):
            end += 1
        yield state, states[end].to_ns
        at = end + 1


def _goes_on(state: _State, then: _State) -> bool:
    return then.times is state.times and not (then.is_paused or then.is_removed)


def _at(op: Operation) -> str:
    return f"{op.topic}/{op.queue}@{op.off}"
