"""Are the facts of a queue those of one list, and if not, which rows are to be looked at again?

Values first: when they disagree, times would only blame innocent operations. Suspects are few and
chosen by their offset or value alone, so they are the same however the rows came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.chunks import (
    Answer,
    Ask,
    Bound,
    Chunk,
    Clash,
    Extra,
    Free,
    Lows,
    Pieces,
    Seen,
    best_before,
    chunk_of,
    clashes_of,
    few,
    look_again,
    merged_lows,
    pack,
    spares_in,
    unpack,
)
from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    NOT_YET,
    REPORTED_MAX,
    SUSPECTS_MAX,
    Flags,
    QueueFacts,
    Spares,
    repeated,
)
from dledger.jepsen_like.history.operation import NEVER, NOTHING

LookAgain = Callable[[Sequence[Ask]], Sequence[Answer]]
"""Given what to ask of each chunk, in their order: their answers, in any."""


class TimePair(msgspec.Struct, frozen=True):
    """Offset *low* was missing at *low_ns*, and *high*, not below, there at *high_ns* before.

    Attributes:
        low_op: The send without an acknowledged offset that proves it, `NOTHING` for any other row.
        high_op: Likewise.
        is_filler: That send was not seen: the gap at *low* is its, or a later one's.
    """

    low: int
    high: int
    low_ns: int
    high_ns: int
    low_op: int = NOTHING
    high_op: int = NOTHING
    is_filler: bool = False


class Judged(msgspec.Struct):
    """The judgement of the facts of a queue.

    Attributes:
        sends: Sends looked at, the appends of transactions included.
        reads: Reads that had to be current.
        attempts: Sends that may have succeeded.
        offs: Offsets that hold two values.
        values: Values that no client may have sent, or that are at two places.
        reads_wrong: Reads that contradict themselves.
        pulls_wrong: Pulls that found something else than was there, by their hash.
        unproved: Pulls whose hash could not be compared: a message of theirs is unknown.
        beyond: The operation that saw the queue longer than it can be.
        pairs: Times that contradict each other.
        lows: Pairs of reads whose first offset kept went back: earlier, later.
        first_kept: Greatest first offset kept that a read names, its call and the read; 0: none.
    """

    sends: int = 0
    reads: int = 0
    acked: int = 0
    length: int = 0
    attempts: int = 0
    offs: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    reads_wrong: tuple[int, ...] = ()
    pulls_wrong: tuple[int, ...] = ()
    unproved: int = 0
    beyond: int = NOTHING
    pairs: tuple[TimePair, ...] = ()
    lows: tuple[tuple[int, int, int, int, int], ...] = ()
    first_kept: tuple[int, int, int] = (0, NOTHING, NOTHING)
    rows: int = 0

    @property
    def is_valid(self) -> bool:
        """Whether nothing is wrong."""
        wrong = (self.offs, self.values, self.reads_wrong, self.pulls_wrong, self.pairs, self.lows)
        return not any(wrong) and self.length <= self.attempts


def judge_queue(facts: QueueFacts) -> Judged:
    """Judge the facts of a whole queue. They are used up by it."""
    facts.settle()
    spares = facts.spares()
    again = repeated(np.concatenate((acknowledged(facts), spares.value[~spares.failed])))
    return judge_chunks([chunk_of(facts)], again, lambda asks: [look_again(facts, asks[0])])


def acknowledged(facts: QueueFacts) -> I64:
    """Return the value of each offset, and those that had to give way to it."""
    log = facts.log[: facts.end]
    parts: list[I64] = [log[log != NOTHING]]
    if facts.displaced:
        pairs = np.concatenate([np.stack(part, axis=1) for part in facts.displaced])
        parts.append(np.unique(pairs, axis=0)[:, 1])
    return np.concatenate(parts)


def attempts_of(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Return how long the queue is, and how many sends may have succeeded."""
    live = sum(int(np.count_nonzero(~unpack(Spares, [c.spares]).failed)) for c in chunks)
    length = max((chunk.length for chunk in chunks), default=0)
    return length, sum(chunk.acked for chunk in chunks) + live


def judge_chunks(chunks: Sequence[Chunk], again: I64, look: LookAgain) -> Judged:
    """Judge all chunks of a queue together.

    *chunks*: without a gap; where the queue is longer than sends can be, cut at their number.
    """
    length, attempts = attempts_of(chunks)
    spares = spares_in(chunks)
    judged = Judged(length=length, attempts=attempts)
    judged.sends = sum(chunk.sends for chunk in chunks)
    judged.reads = sum(chunk.reads for chunk in chunks)
    judged.acked = sum(chunk.acked for chunk in chunks)
    judged.rows = sum(chunk.rows for chunk in chunks)
    judged.reads_wrong = _least(chunk.reads_wrong for chunk in chunks)
    bound = _agree(chunks, spares, again, judged)
    _join_pulls(chunks, judged)
    lows = merged_lows(unpack(Lows, [chunk.lows for chunk in chunks]))
    if len(lows.low) and lows.low[-1] > 0:
        judged.first_kept = (int(lows.low[-1]), int(lows.call[-1]), int(lows.op_id[-1]))
    went_back = _went_back(lows)
    if length > attempts:
        judged.beyond = _longest(chunks)
    is_clear = not (judged.offs or judged.values or judged.reads_wrong or judged.pulls_wrong)
    times = _Times(chunks, spares, bound, length) if is_clear and length <= attempts else None
    if times is not None and times.empty:
        judged.attempts, judged.beyond, times = length - times.empty, _longest(chunks), None
    if went_back or (times is not None and times.is_wrong):
        asks = [Ask() for _ in chunks] if times is None else times.asks()
        answers = look([msgspec.structs.replace(ask, lows=pack(lows)) for ask in asks])
        judged.lows = _first_lows(answers)
        judged.pairs = () if times is None else times.pairs(answers)
    return judged


def _least(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({one for part in parts for one in part})[:SUSPECTS_MAX])


def _longest(chunks: Sequence[Chunk]) -> int:
    """Return the operation that saw the queue longest: of several, the first of the first kind."""
    found = (NOTHING, NOTHING)
    for kind in range(len(chunks[0].longest)):
        ends = [chunk.longest[kind] for chunk in chunks]
        end = max(end for end, _ in ends)
        who = [op_id for its, op_id in ends if its == end and op_id != NOTHING]
        if end > found[0]:
            found = (end, min(who, default=NOTHING))
    return found[1]


def _agree(chunks: Sequence[Chunk], spares: Spares, again: I64, judged: Judged) -> I64:
    """Compare values; return the offset of each spare send that a pull found, else `NOTHING`."""
    log_at = {off: value for chunk in chunks for off, value in chunk.offs}
    judged.offs = tuple(sorted(log_at)[:SUSPECTS_MAX])
    off, value = unpack(Seen, [chunk.seen for chunk in chunks])
    if len(chunks) > 1:
        order = np.lexsort((off, value))
        off, value = off[order], value[order]
    place = np.searchsorted(value, spares.value)
    hit = np.zeros(len(spares.value), dtype=np.bool_)
    within = place < len(value)
    hit[within] = value[place[within]] == spares.value[within]
    bound = np.full(len(spares.value), NOTHING, dtype=np.int64)
    bound[hit] = off[place[hit]]
    explained = np.zeros(len(value), dtype=np.bool_)
    explained[place[hit]] = True
    refused = spares.value[hit & spares.failed]
    values = _least(
        (
            few((again, value[1:][value[1:] == value[:-1]])),
            few((np.setdiff1d(refused, spares.value[hit & ~spares.failed]), value[~explained])),
            *(chunk.values for chunk in chunks),
        )
    )
    held = {log_at[at] for at in judged.offs} - {NOTHING}
    judged.values = tuple(sorted({*values, *held}))
    return bound


def _join_pulls(chunks: Sequence[Chunk], judged: Judged) -> None:
    """Put the pieces of pulls that reach over borders together."""
    pieces = unpack(Pieces, [chunk.pieces for chunk in chunks])
    ids, which = np.unique(pieces.op_id, return_inverse=True)
    sums = np.zeros(len(ids), dtype=np.uint64)
    np.add.at(sums, which, pieces.sum.view(np.uint64) if len(which) else sums[:0])
    holes = np.zeros(len(ids), dtype=np.int64)
    np.add.at(holes, which, pieces.holes)
    expected = np.zeros(len(ids), dtype=np.int64)
    expected[which] = pieces.hash
    wrong = ids[(holes == 0) & (sums.view(np.int64) != expected)]
    judged.pulls_wrong = _least((few([wrong]), *(chunk.pulls_wrong for chunk in chunks)))
    judged.unproved = sum(chunk.unproved for chunk in chunks) + int(np.count_nonzero(holes))


def _went_back(lows: Lows) -> bool:
    if len(lows.low) < 2:
        return False
    best, _ = best_before(lows, lows.last_call)
    return bool((best > lows.low).any())


def _first_lows(answers: Sequence[Answer]) -> tuple[tuple[int, int, int, int, int], ...]:
    every = {row for answer in answers for row in answer.lows}
    return tuple(sorted(every, key=lambda row: (row[4], row[3], row[1]))[:REPORTED_MAX])


def _silent(chunks: Sequence[Chunk], length: int) -> list[Chunk]:
    """Return chunks for the offsets that no chunk knows: there is nothing but gaps."""
    found: list[Chunk] = []
    reached = 0
    ends = sorted((chunk.begin, chunk.end) for chunk in chunks)
    for begin, end in (*ends, (length, length)):
        off = np.arange(reached, min(begin, length), dtype=np.int64)
        if len(off):
            none = (np.full(len(off), blank, dtype=np.int64) for blank in (NOT_YET, NEVER))
            found.append(Chunk(reached, int(off[-1]) + 1, free=pack((off, *none))))
        reached = max(reached, end)
    return found


class _Times:
    """The times of a queue whose values agree."""

    def __init__(self, chunks: Sequence[Chunk], spares: Spares, bound: I64, length: int) -> None:
        self.given = chunks
        self.silent = _silent(chunks, length)
        self.chunks = sorted((*chunks, *self.silent), key=lambda chunk: (chunk.begin, chunk.end))
        self.spares, self.bound = spares, bound
        free = unpack(Free, [chunk.free for chunk in self.chunks])
        is_bound = bound != NOTHING
        self.gaps = np.setdiff1d(free.off, bound[is_bound])
        unseen = np.flatnonzero(~is_bound & ~spares.failed)
        self.fillers = unseen[: len(self.gaps)]
        self.empty = len(self.gaps) - len(self.fillers)
        """Gaps that no send can have filled: an offset that two acknowledgements name is one."""
        if self.empty:
            return
        late: list[int] = []
        if spares.required[unseen].any():
            self._bind(self.gaps[:0], self.fillers[:0])
            self.fillers, late = self._filled(unseen, free)
        self._bind(self.gaps, self.fillers)
        self.late = self._late(late, length)
        self.is_wrong = bool(self.late) or self._is_wrong(free)

    def _bind(self, gaps: I64, fillers: I64) -> None:
        """Take the bounds that sends without an acknowledged offset set, and carry all of them."""
        is_bound = self.bound != NOTHING
        call, ret = self.spares.call, self.spares.ret
        off = np.concatenate((gaps, self.bound[is_bound]))
        lo = np.concatenate((call[fillers], call[is_bound]))
        hi = np.concatenate((np.full(len(gaps), NEVER, dtype=np.int64), ret[is_bound]))
        order = np.argsort(off, kind="stable")
        self.extra = Extra(off[order], lo[order], hi[order])
        self.before, self.after = self._carried()

    def _windows(self, free: Free) -> tuple[I64, I64]:
        """Return the bounds of each gap, those of all other offsets taken into account."""
        begins = np.array([chunk.begin for chunk in self.chunks], dtype=np.int64)
        at = np.searchsorted(begins, free.off, "right") - 1
        lo = np.maximum(free.lo, np.array([ns for ns, _ in self.before], dtype=np.int64)[at])
        hi = np.minimum(free.hi, np.array([ns for ns, _ in self.after], dtype=np.int64)[at])
        np.maximum.at(lo, np.searchsorted(free.off, self.extra.off), self.extra.lo)
        np.minimum.at(hi, np.searchsorted(free.off, self.extra.off), self.extra.hi)
        earliest, latest = np.maximum.accumulate(lo), np.minimum.accumulate(hi[::-1])[::-1]
        place = np.searchsorted(free.off, self.gaps)
        return earliest[place], latest[place]

    def _filled(self, unseen: I64, free: Free) -> tuple[I64, list[int]]:
        """Return which send fills each gap, and those that fit nowhere or only at the end."""
        call, ret = self.spares.call, self.spares.ret
        waiting: list[tuple[int, int]] = []
        fillers: list[int] = []
        late: list[int] = []
        reached, at = NOT_YET, 0
        for low, high in zip(*(column.tolist() for column in self._windows(free)), strict=True):
            while at < len(unseen) and (call[unseen[at]] <= high or not waiting):
                heappush(waiting, (int(ret[unseen[at]]), int(unseen[at])))
                at += 1
            its_ret, one = heappop(waiting)
            reached = max(reached, low, int(call[one]))
            if its_ret < reached:
                late.append(one)
            fillers.append(one)
        left = [one for _, one in waiting] + unseen[at:].tolist()
        late += [one for one in left if ret[one] != NEVER]
        return np.array(fillers, dtype=np.int64), late

    def _late(self, late: list[int], length: int) -> list[TimePair]:
        """Return what proves that sends that had returned without an offset are absent."""
        bounds = [chunk.highest_lo for chunk in self.chunks]
        bounds += zip(self.extra.lo.tolist(), self.extra.off.tolist(), strict=True)
        low_ns, low = max(bounds, key=lambda bound: (bound[0], -bound[1]), default=(NOT_YET, 0))
        pairs = [
            TimePair(low, length, low_ns, int(self.spares.ret[one]), high_op=self._op(one))
            for one in late
            if self.spares.ret[one] < low_ns
        ]
        return sorted(pairs, key=lambda pair: (pair.high_ns, pair.high_op))[:REPORTED_MAX]

    def _op(self, spare: int) -> int:
        return int(self.spares.op_id[spare])

    def _slices(self) -> list[slice]:
        """Return which extra bounds concern the offsets from the begin of each chunk on."""
        begins = [chunk.begin for chunk in self.chunks]
        cuts = [0, *np.searchsorted(self.extra.off, begins[1:]).tolist(), len(self.extra.off)]
        return [slice(a, b) for a, b in pairwise(cuts)]

    def _carried(self) -> tuple[list[Bound], list[Bound]]:
        """Return the greatest lower bound before each chunk, the least upper one behind it."""
        lows, highs = [], []
        for chunk, its in zip(self.chunks, self._slices(), strict=True):
            off, lo, hi = (column[its] for column in self.extra)
            low, high = chunk.highest_lo, chunk.lowest_hi
            if len(off):
                at, to = int(np.argmax(lo)), int(np.argmin(hi))
                low = max(low, (int(lo[at]), int(off[at])), key=lambda b: (b[0], -b[1]))
                high = min(high, (int(hi[to]), int(off[to])))
            lows.append(low)
            highs.append(high)
        before = [(NOT_YET, NOTHING)]
        for low in lows[:-1]:
            before.append(low if low[0] > before[-1][0] else before[-1])
        after = [(NEVER, NOTHING)]
        for high in reversed(highs[1:]):
            after.append(high if high[0] <= after[-1][0] else after[-1])
        self.highs = highs
        return before, after[::-1]

    def _is_wrong(self, free: Free) -> bool:
        if any(chunk.is_inverted for chunk in self.chunks):
            return True
        if any(low[0] > high[0] for low, high in zip(self.before, self.highs, strict=True)):
            return True
        off, lo, hi = self.extra
        if not len(off):
            return False
        place = np.searchsorted(free.off, off)
        clash: Flags = (lo > free.hi[place]) | (hi < free.lo[place])
        return bool(clash.any()) or bool((np.maximum.accumulate(lo) > hi).any())

    def asks(self) -> list[Ask]:
        """Return what to ask of each chunk, in the order they came in."""
        return [self.ask(chunk) for chunk in self.given]

    def ask(self, chunk: Chunk) -> Ask:
        """Return the bounds that come to a chunk from elsewhere."""
        at = next(at for at, one in enumerate(self.chunks) if one is chunk)
        off = self.extra.off
        its = slice(*np.searchsorted(off, (chunk.begin, chunk.end)).tolist())
        return Ask(self.before[at], self.after[at], pack(column[its] for column in self.extra))

    def pairs(self, answers: Sequence[Answer]) -> tuple[TimePair, ...]:
        """Return of each offset that sets an upper bound the first clash."""
        clashes = [clash for answer in answers for clash in answer.clashes]
        for chunk in self.silent:
            size = chunk.end - chunk.begin
            lo, hi = (np.full(size, none, dtype=np.int64) for none in (NOT_YET, NEVER))
            clashes += clashes_of(lo, hi, chunk.begin, self.ask(chunk))
        first: dict[int, Clash] = {}
        # The offset after the last of a chunk may be in a silent one, too: more comes to that.
        for clash in sorted(clashes, key=lambda clash: (clash.at, -clash.low_ns)):
            first.setdefault(clash.high, clash)
        pairs = [TimePair(one.low, one.high, one.low_ns, one.high_ns) for one in first.values()]
        return tuple(self._named(pair) for pair in [*pairs, *self.late][:REPORTED_MAX])

    def _named(self, pair: TimePair) -> TimePair:
        """Name the sends without an acknowledged offset that set a bound."""
        spares, bound = self.spares, self.bound
        low = np.flatnonzero((bound == pair.low) & (spares.call == pair.low_ns))
        high = np.flatnonzero((bound == pair.high) & (spares.ret == pair.high_ns))
        filler = self.fillers[self.gaps == pair.low]
        if len(low):
            pair = msgspec.structs.replace(pair, low_op=int(spares.op_id[low].min()))
        elif len(filler) and int(spares.call[filler[0]]) == pair.low_ns:
            op_id = int(spares.op_id[filler[0]])
            pair = msgspec.structs.replace(pair, low_op=op_id, is_filler=True)
        if len(high):
            pair = msgspec.structs.replace(pair, high_op=int(spares.op_id[high].min()))
        return pair
