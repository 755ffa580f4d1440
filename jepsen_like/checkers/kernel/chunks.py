"""What one chunk of offsets of a queue contributes to the judgement of the whole queue.

A queue that is not cut is one chunk. Pulls that kept a hash of their messages are compared with the
log: the hash of a range is a difference of two sums, so each pull costs two look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    NOT_YET,
    REPORTED_MAX,
    STRIDE_ROWS,
    SUSPECTS_MAX,
    Flags,
    Pulls,
    QueueFacts,
    Spares,
)
from dledger.jepsen_like.history.columns import mix
from dledger.jepsen_like.history.operation import NEVER, NOTHING


class Compared(NamedTuple):
    """What became of pulls.

    Attributes:
        wrong: Those that found something else than was there.
        unproved: How many could not be compared: a message of theirs is unknown.
        partial: Of those that are cut, the hash of the messages here.
        unknown: Likewise, how many of the messages here are unknown.
    """

    wrong: I64
    unproved: int
    cut: Pulls
    partial: I64
    unknown: I64


class _Sums(NamedTuple):
    """Of each beginning of the log: its hash, and how many holes it has; None: there are none."""

    begin: int
    words: npt.NDArray[np.uint64]
    holes: I64 | None


def compare_hashes(facts: QueueFacts) -> Compared:
    """Compare the pulls of a queue, or of a chunk of one, with its log."""
    parts = facts.pulls()
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Compared(none, 0, Pulls(*[none] * len(Pulls._fields)), none, none)
    sums = _sums(facts)
    compared = [_compare(pulls, sums, facts.size) for pulls in parts]
    cut = Pulls(
        *(np.concatenate(column) for column in zip(*(one.cut for one in compared), strict=True))
    )
    wrong, partial, unknown = (
        np.concatenate(column)
        for column in zip(*((one.wrong, one.partial, one.unknown) for one in compared), strict=True)
    )
    return Compared(wrong, sum(one.unproved for one in compared), cut, partial, unknown)


def _sums(facts: QueueFacts) -> _Sums:
    begin, size = facts.begin, facts.end
    log = facts.log[:size]
    holes: Flags = log == NOTHING
    if not holes.any():
        return _Sums(begin, _running_hash(begin, log), None)
    log = log.copy()
    for held_off, held_value in facts.held().values():
        inside = np.flatnonzero((held_off >= begin) & (held_off < begin + size))
        missing = inside[log[held_off[inside] - begin] == NOTHING]
        log[held_off[missing] - begin] = held_value[missing]
    before = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(log == NOTHING, out=before[1:])
    return _Sums(begin, _running_hash(begin, log), before if before[-1] else None)


def _running_hash(begin: int, log: I64) -> npt.NDArray[np.uint64]:
    """Return the hash of each beginning of a list of values, that of none first."""
    sums = np.zeros(len(log) + 1, dtype=np.uint64)
    for at in range(0, len(log), STRIDE_ROWS):
        values = log[at : at + STRIDE_ROWS]
        words = mix(np.arange(begin + at, begin + at + len(values), dtype=np.int64), values)
        words[:1] += sums[at : at + 1]
        np.cumsum(words, dtype=np.uint64, out=sums[at + 1 : at + 1 + len(values)])
    return sums


def _compare(pulls: Pulls, sums: _Sums, chunk_size: int | None) -> Compared:
    """Compare some pulls; of a chunk, with what of them lies in it."""
    begin, size = sums.begin, len(sums.words) - 1
    width = size if chunk_size is None else chunk_size
    end = pulls.off + pulls.size
    first = np.clip(pulls.off - begin, 0, width)
    last = end - begin
    if chunk_size is not None:
        last = np.clip(last, 0, width)
    unknown = np.where(pulls.off < 0, -pulls.off, 0)
    unknown += np.maximum(last - np.maximum(first, size), 0)
    first, last = np.minimum(first, size), np.clip(last, 0, size)
    if sums.holes is not None:
        unknown += sums.holes[last] - sums.holes[first]
    partial = (sums.words[last] - sums.words[first]).view(np.int64)
    whole: Flags = np.ones(len(end), dtype=np.bool_)
    if chunk_size is not None:
        whole = (pulls.off < 0) | ((pulls.off >= begin) & (end <= begin + width))
    wrong = whole & (unknown == 0) & (partial != pulls.hash)
    cut = np.flatnonzero(~whole)
    return Compared(
        pulls.op_id[wrong],
        int(np.count_nonzero(whole & (unknown > 0))),
        Pulls(*(column[cut] for column in pulls)),
        partial[cut],
        unknown[cut],
    )


Kind = TypeVar("Kind", bound=Any)
Bound = tuple[int, int]
"""A time, and the first offset that has it."""


class Free(NamedTuple):
    """Offsets that no acknowledged send has: the bounds that their chunk gives them."""

    off: I64
    lo: I64
    hi: I64


class Seen(NamedTuple):
    """Messages that pulls found at free offsets, each once."""

    off: I64
    value: I64


class Pieces(NamedTuple):
    """Of a pull kept as a hash that reaches into other chunks, what is here of it."""

    op_id: I64
    hash: I64
    sum: I64
    holes: I64


class Lows(NamedTuple):
    """For each first offset kept that reads name: the first read, and the last call of one."""

    low: I64
    ret: I64
    call: I64
    op_id: I64
    last_call: I64


class Chunk(msgspec.Struct):
    """One chunk of a queue; arrays are bytes, see `pack`.

    Attributes:
        begin: First offset.
        size: How many offsets a chunk has; 0: all.
        rows, sends, acked, reads: How many.
        length, longest: See `QueueFacts`.
        offs: Offsets that hold two values, and the value that counts.
        values: Values that no client may have sent, or at two places.
        reads_wrong, pulls_wrong, unproved: See `Judged`.
        lowest_hi, highest_lo: Least upper and greatest lower bound.
        is_inverted: Some lower bound lies above an upper one of the same or a later offset.
        free, seen, pieces, lows, spares: The named tuples of these names.
    """

    begin: int = 0
    end: int = 0
    size: int = 0
    rows: int = 0
    sends: int = 0
    acked: int = 0
    reads: int = 0
    length: int = 0
    longest: tuple[Bound, ...] = ()
    offs: tuple[Bound, ...] = ()
    values: tuple[int, ...] = ()
    reads_wrong: tuple[int, ...] = ()
    pulls_wrong: tuple[int, ...] = ()
    unproved: int = 0
    lowest_hi: Bound = (NEVER, NOTHING)
    highest_lo: Bound = (NOT_YET, NOTHING)
    is_inverted: bool = False
    free: bytes = b""
    seen: bytes = b""
    pieces: bytes = b""
    lows: bytes = b""
    spares: bytes = b""


def pack(columns: Iterable[I64]) -> bytes:
    """Return arrays of one length as bytes."""
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns]).tobytes()


def unpack(kind: type[Kind], parts: Iterable[bytes]) -> Kind:
    """Return what `pack` made of tuples of *kind*, joined."""
    width = len(kind._fields)
    arrays = [np.frombuffer(part, dtype=np.int64).reshape(width, -1) for part in parts]
    arrays = arrays or [np.zeros((width, 0), dtype=np.int64)]
    found: Kind = kind(*(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)))
    return found


def few(parts: Iterable[I64]) -> tuple[int, ...]:
    """Return the least different ones."""
    joined = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    return tuple(np.unique(joined)[:SUSPECTS_MAX].tolist()) if len(joined) else ()


def chunk_of(facts: QueueFacts) -> Chunk:
    """Return the chunk of facts whose limit and capacity are set. They are used up by it."""
    chunk = Chunk(facts.begin, facts.begin + facts.end, facts.size or 0)
    chunk.rows, chunk.sends, chunk.acked = facts.rows, facts.sends, facts.acked
    chunk.reads, chunk.length, chunk.longest = facts.reads, facts.length, tuple(facts.longest)
    chunk.reads_wrong = few(facts.contradictions)
    chunk.spares = pack(facts.spares())
    chunk.lows = pack(_lows(facts))
    free = np.flatnonzero(facts.log[: facts.end] == NOTHING)
    _see(facts, chunk)
    pulls = compare_hashes(facts)
    chunk.pulls_wrong, chunk.unproved = few([pulls.wrong]), pulls.unproved
    chunk.pieces = pack((pulls.cut.op_id, pulls.cut.hash, pulls.partial, pulls.unknown))
    _bounds(facts, chunk, free)
    return chunk


def _see(facts: QueueFacts, chunk: Chunk) -> None:
    """Compare what pulls found with what was acknowledged; what was not stays as seen."""
    log, begin = facts.log[: facts.end], facts.begin
    offs, values = [*facts.conflicts, facts.far()[0]], list[I64]()
    seen_off, seen_value = facts.seen()
    place = seen_off - begin
    inside = (place >= 0) & (place < len(log))
    values.append(seen_value[~inside])
    place, value = place[inside], seen_value[inside]
    known = log[place]
    other = (known != NOTHING) & (known != value)
    offs.append(place[other] + begin)
    values.append(value[other])
    free = known == NOTHING
    place, value = place[free], value[free]
    np.maximum.at(log, place, value)
    other = log[place] != value
    offs.append(place[other] + begin)
    values.append(value[other])
    order = np.lexsort((place, value))
    place, value = place[order], value[order]
    first = np.append(True, (value[1:] != value[:-1]) | (place[1:] != place[:-1]))[: len(place)]
    chunk.seen = pack((place[first] + begin, value[first]))
    chunk.offs = tuple(
        (off, int(facts.log[off - begin]) if off - begin < len(facts.log) else NOTHING)
        for off in few(offs)
    )
    chunk.values = few(values)


def _bounds(facts: QueueFacts, chunk: Chunk, free: I64) -> None:
    lo, hi = scanned(facts)
    if not len(lo):
        chunk.free = pack([free] * len(Free._fields))
        return
    free_lo, free_hi = np.empty_like(free), np.empty_like(free)
    heads = np.arange(0, len(lo), STRIDE_ROWS)
    # Of each stride, the least upper bound from its begin to the end of the chunk.
    after = np.minimum.accumulate(np.minimum.reduceat(hi, heads)[::-1])[::-1]
    before = NOT_YET
    for at, behind in zip(heads.tolist(), [*after[1:].tolist(), NEVER], strict=True):
        its = slice(at, at + STRIDE_ROWS)
        earliest = np.maximum(np.maximum.accumulate(lo[its]), before)
        latest = np.minimum(np.minimum.accumulate(hi[its][::-1])[::-1], behind)
        chunk.is_inverted |= bool((earliest > latest).any())
        rows = slice(*np.searchsorted(free, (at, at + STRIDE_ROWS)).tolist())
        free_lo[rows], free_hi[rows] = earliest[free[rows] - at], latest[free[rows] - at]
        before = int(earliest[-1])
    chunk.highest_lo = (before, int(np.argmax(lo)) + chunk.begin)
    chunk.lowest_hi = (int(after[0]), int(np.argmin(hi)) + chunk.begin)
    chunk.free = pack((free + chunk.begin, free_lo, free_hi))


def scanned(facts: QueueFacts) -> tuple[I64, I64]:
    """Return the bounds of each offset, and of the one after the last if it is of this chunk."""
    size = min(facts.end + 1, len(facts.lo) if facts.size is None else facts.size)
    return facts.lo[:size], facts.hi[:size]


def _lows(facts: QueueFacts) -> Lows:
    parts = [_lowest(*part) for part in facts.lows()]
    return merged_lows(unpack(Lows, [pack(part) for part in parts]))


def _lowest(call: I64, ret: I64, low: I64, op_id: I64) -> Lows:
    if low.min() == low.max():
        rows = np.flatnonzero(ret == ret.min())
        first = rows[np.lexsort((op_id[rows], call[rows]))[:1]]
        return Lows(low[first], ret[first], call[first], op_id[first], call.max(keepdims=True))
    return merged_lows(Lows(low, ret, call, op_id, call))


def merged_lows(lows: Lows) -> Lows:
    """Return one row for each offset."""
    order = np.lexsort((lows.op_id, lows.call, lows.ret, lows.low))
    lows = Lows(*(column[order] for column in lows))
    heads = np.flatnonzero(np.append(True, lows.low[1:] != lows.low[:-1])[: len(order)])
    if not len(heads):
        return lows
    last_call = np.maximum.reduceat(lows.last_call, heads)
    low, ret, call, op_id = (column[heads] for column in lows[:-1])
    return Lows(low, ret, call, op_id, last_call)


def spares_in(chunks: Iterable[Chunk]) -> Spares:
    """Return the sends without an offset, in the order of their calls."""
    spares = unpack(Spares, (chunk.spares for chunk in chunks))
    order = np.lexsort((spares.op_id, spares.call))
    return Spares(*(column[order] for column in spares))


class Ask(msgspec.Struct, frozen=True):
    """What a chunk is looked at again for: bounds that come from elsewhere.

    Attributes:
        before: Greatest lower bound before the chunk.
        after: Least upper bound behind it.
        extra: Bounds by sends without an acknowledged offset: offset, lower, upper; packed.
        lows: `Lows` of the whole queue; packed.
        strange: Values held where no send was acknowledged, sorted; packed.
    """

    before: Bound = (NOT_YET, NOTHING)
    after: Bound = (NEVER, NOTHING)
    extra: bytes = b""
    lows: bytes = b""
    strange: bytes = b""


class Extra(NamedTuple):
    """See `Ask.extra`."""

    off: I64
    lo: I64
    hi: I64


class Clash(msgspec.Struct, frozen=True):
    """The first offset *at*, up to *high*, whose lower bound lies above its upper one."""

    at: int
    low: int
    high: int
    low_ns: int
    high_ns: int


class Answer(msgspec.Struct):
    """What a second look finds.

    Attributes:
        clashes: Of each offset that sets an upper bound, one; the first few.
        lows: Reads that name a lesser first offset than before: see `Judged.lows`.
        echo: Values of `Ask.strange` that are where they were acknowledged; packed.
    """

    clashes: tuple[Clash, ...] = ()
    lows: tuple[tuple[int, int, int, int, int], ...] = ()
    echo: bytes = b""


def look_again(facts: QueueFacts, ask: Ask) -> Answer:
    """Return what is wrong in this chunk, the rest of the queue taken into account."""
    lows = unpack(Lows, [ask.lows] if ask.lows else [])
    return Answer(clashes_of(*scanned(facts), facts.begin, ask), _gone_back(facts, lows))


def clashes_of(lo: I64, hi: I64, begin: int, ask: Ask) -> tuple[Clash, ...]:
    """Return the clashes in a chunk; the bounds of its offsets are used up by it."""
    extra = unpack(Extra, [ask.extra] if ask.extra else [])
    np.maximum.at(lo, extra.off - begin, extra.lo)
    np.minimum.at(hi, extra.off - begin, extra.hi)
    earliest = np.maximum(np.maximum.accumulate(lo), ask.before[0])
    latest = np.minimum(np.minimum.accumulate(hi[::-1])[::-1], ask.after[0])
    bad = np.flatnonzero(earliest > latest)
    found: list[Clash] = []
    while len(bad) and len(found) < REPORTED_MAX:
        at = int(bad[0])
        low = (int(earliest[at]), int(np.argmax(lo[: at + 1])) + begin)
        if ask.before[0] >= low[0]:
            low = ask.before
        place = at + int(np.argmin(hi[at:]))
        high = (int(hi[place]), place + begin)
        if ask.after[0] < high[0]:
            high = ask.after
        found.append(Clash(at + begin, low[1], high[1], low[0], high[0]))
        bad = bad[bad + begin > high[1]]
    return tuple(found)


def _gone_back(facts: QueueFacts, known: Lows) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return earlier and later read, the offsets they name, and when the later one was called."""
    parts = facts.lows()
    if not parts or not len(known.low):
        return ()
    call, _, low, op_id = (np.concatenate(column) for column in zip(*parts, strict=True))
    best, first = best_before(known, call)
    wrong = np.flatnonzero(best > low)
    wrong = wrong[np.lexsort((op_id[wrong], low[wrong], call[wrong]))][:REPORTED_MAX]
    return tuple(
        (int(known.op_id[first[at]]), int(op_id[at]), int(best[at]), int(low[at]), int(call[at]))
        for at in wrong.tolist()
    )


def best_before(known: Lows, call: I64) -> tuple[I64, I64]:
    """Return the greatest offset named before each call, `NOT_YET` for none, and its row."""
    order = np.argsort(known.ret, kind="stable")
    best = np.maximum.accumulate(known.low[order])
    count = np.searchsorted(known.ret[order], call, "left")
    greatest = np.append(np.int64(NOT_YET), best)[count]
    return greatest, np.minimum(np.searchsorted(known.low, greatest, "left"), len(known.low) - 1)
