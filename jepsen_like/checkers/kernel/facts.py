"""What the rows of one queue prove, gathered batch by batch in columns.

For each offset: the latest time at which its append had certainly not happened, the earliest at
which it certainly had, and its value. All three are merged, never ordered: batches may come in any
order. 24 bytes per offset, and some for every send without an offset and every pull with a hash.

Spec: docs/internals/proofs/queue-log.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.history.operation import CLIENT_BITS, NEVER, NOTHING, F, Level, Outcome

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]

OPS_COLUMNS: Final = (
    "op_id", "f", "outcome", "level", "call_ns", "ret_ns", "off", "cnt", "max_off", "min_off",
    "value", "range_hash", "due_ns",
)  # fmt: skip
"""What `add_ops` reads."""
OBS_COLUMNS: Final = ("op_id", "replica", "off", "value")
"""What `add_obs` reads; `replica` as a number."""
QUEUE_OPERATIONS: Final = (F.SEND, F.PULL, F.MAX_OFFSET, F.MIN_OFFSET)

REPORTED_MAX: Final = 8
"""Violations reported per kind and queue; one bug makes thousands."""
SUSPECTS_MAX: Final = 64
"""Offsets or values of each kind that are read again; of each anomaly 8 are reported."""
NOT_YET: Final = -(1 << 63)
"""No bound below."""
CAPACITY_MIN: Final = 1 << 6
"""Offsets of the first arrays, which double: 1.5 KiB for a queue that is hardly used."""
SPARSE_MIN: Final = 1 << 16
"""Counters so far apart are sorted only where they are fewer than an eighth of that."""
STRIDE_ROWS: Final = 1 << 15
"""Rows taken at once: what is computed of them stays in a processor's cache, and in memory that
the process has; on a virtual machine new memory costs more than the work done in it."""


_BLANKS: Final = {"lo": NOT_YET, "hi": NEVER, "log": NOTHING}
"""Arrays by offset, and what stands where nothing is known."""
_SUMS: Final = ("rows", "sends", "acked", "reads")
_PARTS: Final = (
    "conflicts", "displaced", "contradictions", "_lows", "_seen",
)  # fmt: skip
"""Fields of `QueueFacts` by how they are merged."""


class Spares(NamedTuple):
    """Sends that no acknowledgement gives an offset, in the order of their calls.

    One that ended well and has a return must have been appended by then; a delayed one has none.
    """

    op_id: I64
    call: I64
    ret: I64
    value: I64
    outcome: I64

    @property
    def failed(self) -> Flags:
        """Those that certainly did not happen."""
        failed: Flags = self.outcome == Outcome.FAIL
        return failed

    @property
    def required(self) -> Flags:
        """Those that certainly happened, between their call and their return."""
        required: Flags = (self.outcome == Outcome.OK) & (self.ret != NEVER)
        return required


class Pulls(NamedTuple):
    """Pulls whose messages are known by their hash alone."""

    op_id: I64
    off: I64
    size: I64
    hash: I64


class _Far(NamedTuple):
    """Facts of offsets beyond the capacity, kept until it grows."""

    off: I64
    ns: I64
    value: I64
    is_low: bool


class QueueFacts:
    """Facts of one queue; see the module.

    Args:
        size: How many offsets; None: all that follow.

    Attributes:
        lo, hi, log: By offset; `NOT_YET`, `NEVER` and `NOTHING` where nothing is known.
        length: One past the last offset of any fact.
        displaced: Offset and value where a greater one was acknowledged at the same offset.
        longest: Greatest end that was seen, and by whom: reads of the end, pulls, sends, first
            offsets kept.
        rows, sends, acked, reads: How many; of a row that several chunks got, one counts it.
    """

    def __init__(self, begin: int = 0, size: int | None = None) -> None:
        self.begin, self.size = begin, size
        self.lo = np.full(CAPACITY_MIN, NOT_YET, dtype=np.int64)
        self.hi = np.full(CAPACITY_MIN, NEVER, dtype=np.int64)
        self.log = np.full(CAPACITY_MIN, NOTHING, dtype=np.int64)
        self.length = 0
        self.conflicts: list[I64] = []
        self.displaced: list[tuple[I64, I64]] = []
        self.contradictions: list[I64] = []
        self.longest = [(0, NOTHING)] * 4
        self.rows = self.sends = self.acked = self.reads = 0
        self.limit: int | None = None
        self._far: list[_Far] = []
        self._spares: list[Spares] = []
        self._pulls: list[Pulls] = []
        self._lows: list[tuple[I64, I64, I64, I64]] = []
        self._seen: list[tuple[I64, I64]] = []
        self._held: dict[int, list[tuple[I64, I64]]] = {}

    # -- taking ----------------------------------------------------------------------------

    def add_ops(self, ops: Columns) -> None:
        """Take rows of `ops`; those of other kinds than `QUEUE_OPERATIONS` are left out."""
        for stride in _strides(ops, OPS_COLUMNS):
            self._take_ops(stride)

    def _take_ops(self, ops: Columns) -> None:
        f, outcome = ops["f"], ops["outcome"]
        of_queue = f <= max(QUEUE_OPERATIONS)
        own = self._own(ops)
        self.rows += int(np.count_nonzero(of_queue if own is None else own & of_queue))
        ok = outcome == Outcome.OK
        send = f == F.SEND
        self._take_acked(ops, np.flatnonzero(send & ok & (ops["off"] != NOTHING)))
        left = np.flatnonzero(send & ~(ok & (ops["off"] != NOTHING)))
        if len(left):
            spare = ("op_id", "call_ns", "ret_ns", "value", "outcome", "due_ns")
            op_id, call, ret, value, how, due = (_words(ops[name], left) for name in spare)
            ret = np.where((how == Outcome.OK) & (due == NOTHING), ret, NEVER)
            self.add_spares(Spares(op_id, call, ret, value, how))
        current = ok if not ops["level"].any() else ok & (ops["level"] == Level.LINEARIZABLE)
        is_pull = f == F.PULL
        reads = np.flatnonzero(current & (is_pull | (f == F.MAX_OFFSET)))
        self.reads += len(reads) if own is None else int(np.count_nonzero(own[reads]))
        self._take_reads(ops, reads)
        hashed = np.flatnonzero(ok & is_pull & (ops["range_hash"] != 0) & (ops["cnt"] > 0))
        if own is not None:
            off, end = ops["off"][hashed], ops["off"][hashed] + ops["cnt"][hashed]
            here = (off < self.begin + (self.size or 0)) & (end > self.begin)
            hashed = hashed[np.where(off < 0, own[hashed], here)]
        if len(hashed):
            names = ("op_id", "off", "cnt", "range_hash")
            self._pulls.append(Pulls(*(_words(ops[name], hashed) for name in names)))
        lows = np.flatnonzero(current & of_queue & (ops["min_off"] != NOTHING))
        if len(lows):
            names = ("call_ns", "ret_ns", "min_off", "op_id")
            call, ret, low, op_id = (_words(ops[name], lows) for name in names)
            self._lows.append((call, ret, low, op_id))
            at = _chosen(low > 0)  # what was removed was there
            self._longer(3, low[at], op_id, np.arange(len(low), dtype=np.int64)[at])
            self._put(low[at] - 1, ret[at], None, is_low=False)

    def _own(self, ops: Columns) -> Flags | None:
        """Return which rows count here; None: all."""
        if self.size is None:
            return None
        anchor = anchors(ops)
        own: Flags = (anchor < 0) | ((anchor >= self.begin) & (anchor < self.begin + self.size))
        return own

    def add_spares(self, spares: Spares) -> None:
        """Take sends without an offset; the append a transaction led to is one, see queue_log."""
        self._spares.append(spares)
        self.sends += len(spares.op_id)

    def add_obs(self, obs: Columns) -> None:
        """Take rows of `obs`; what a final read found (op id `NOTHING`) explains hashes only."""
        for stride in _strides(obs, OBS_COLUMNS):
            self._take_obs(stride)

    def _take_obs(self, obs: Columns) -> None:
        pulled = obs["op_id"] != NOTHING
        rows = np.flatnonzero(pulled)
        if len(rows):
            self._seen.append((_words(obs["off"], rows), _words(obs["value"], rows)))
        rows = np.flatnonzero(~pulled)
        if len(rows):
            names = ("replica", "off", "value")
            replica, off, value = (_words(obs[name], rows) for name in names)
            for number in distinct(replica):
                its = replica == number
                held = self._held.setdefault(number, [])
                held.append((off, value) if its.all() else (off[its], value[its]))

    def _take_acked(self, ops: Columns, rows: I64) -> None:
        if not len(rows):
            return
        off = _words(ops["off"], rows)
        self.sends += len(rows)
        self.acked += len(rows)
        self._longer(2, off + 1, ops["op_id"], rows)
        values = _words(ops["value"], rows)
        self._put(off, _words(ops["call_ns"], rows), values, is_low=True)
        self._put(off, _words(ops["ret_ns"], rows), None, is_low=False)

    def _take_reads(self, ops: Columns, rows: I64) -> None:
        if not len(rows):
            return
        call, ret, end = (_words(ops[name], rows) for name in ("call_ns", "ret_ns", "max_off"))
        count = np.where(ops["f"][rows] == F.PULL, ops["cnt"][rows], 0)
        off, low = _words(ops["off"], rows), _words(ops["min_off"], rows)
        found = count > 0
        last = off + count
        wrong = (found & ((end != NOTHING) & (last > end) | (off < 0))) | (end < NOTHING)
        wrong |= ~found & (off >= low) & (off != NOTHING) & (off < end)
        wrong |= (end != NOTHING) & (low > end)
        if wrong.any():
            self.contradictions.append(_words(ops["op_id"], rows[wrong]))
        at = _chosen(found & (off >= 0))
        self._longer(1, last[at], ops["op_id"], rows[at])
        self._put(last[at] - 1, ret[at], None, is_low=False)
        at = _chosen(end > 0)
        self._longer(0, end[at], ops["op_id"], rows[at])
        self._put(end[at] - 1, ret[at], None, is_low=False)
        at = _chosen(end >= 0)
        self._put(end[at], call[at], None, is_low=True)

    def _longer(self, kind: int, ends: I64, op_id: npt.NDArray[Any], rows: I64) -> None:
        """Remember the greatest end, and the first operation that saw it."""
        if not len(ends):
            return
        longest = int(ends.max())
        self.length = max(self.length, longest)
        known, who = self.longest[kind]
        if longest < known:
            return
        first = int(op_id[rows[np.flatnonzero(ends == longest)]].min())
        if longest == known and who != NOTHING:
            first = min(first, who)
        self.longest[kind] = (longest, first)

    # -- by offset -------------------------------------------------------------------------

    def _put(self, off: I64, ns: I64, value: I64 | None, *, is_low: bool) -> None:
        """Merge facts; those beyond the capacity wait, those of other chunks are left out."""
        off = off - self.begin if self.begin else off
        inside = off >= 0
        if self.size is not None:
            inside &= off < self.size
        if not inside.all():
            off, ns = off[inside], ns[inside]
            value = None if value is None else value[inside]
        self._put_here(off, ns, value, is_low=is_low)

    def _put_here(self, off: I64, ns: I64, value: I64 | None, *, is_low: bool) -> None:
        if not len(off):
            return
        top = int(off.max()) + 1
        if len(self.lo) < top <= (self.rows if self.size is None else self.size):
            # A queue is not longer than there are rows; a wrong offset must not fill the memory.
            self.reserve(max(top, 2 * len(self.lo)))
        if top > len(self.lo):
            beyond = off >= len(self.lo)
            far = np.flatnonzero(beyond)
            none = np.zeros(0, dtype=np.int64)
            values = none if value is None else value[far]
            self._far.append(_Far(off[far], ns[far], values, is_low))
            near = np.flatnonzero(~beyond)
            off, ns = off[near], ns[near]
            value = None if value is None else value[near]
        if is_low:
            np.maximum.at(self.lo, off, ns)
        else:
            np.minimum.at(self.hi, off, ns)
        if value is not None:
            self._write(off, value)

    def _write(self, off: I64, value: I64) -> None:
        before = self.log[off]
        self.log[off] = value
        wrong = ((self.log[off] != value) | (before != NOTHING)) & (before != value)
        if not wrong.any():
            return
        # Of several values the greatest stays, whichever came first.
        self.log[off] = before
        np.maximum.at(self.log, off, value)
        offs, values = np.concatenate((off, off)), np.concatenate((before, value))
        beaten = (values != NOTHING) & (values != self.log[offs])
        self.conflicts.append(np.unique(offs[beaten]) + self.begin)
        self.displaced.append((offs[beaten] + self.begin, values[beaten]))

    def reserve(self, capacity: int) -> None:
        """Make the arrays so long at least, and merge what was beyond them."""
        if capacity <= len(self.lo):
            return
        for name, blank in _BLANKS.items():
            column = getattr(self, name)
            before = len(column)
            # No view of them exists yet; the system moves their pages instead of copying them.
            column.resize(capacity, refcheck=False)
            column[before:] = blank
        waiting, self._far = self._far, []
        for far in waiting:
            value = far.value if len(far.value) else None
            self._put_here(far.off, far.ns, value, is_low=far.is_low)

    # -- elsewhere -------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Memory of the arrays by offset."""
        return sum(getattr(self, name).nbytes for name in _BLANKS)

    def share(self) -> dict[str, Any]:
        """Return what is known, for the facts of the same offsets elsewhere: see `merge`."""
        share: dict[str, Any] = {}
        for name, blank in _BLANKS.items():
            column = getattr(self, name)
            at = np.flatnonzero(column != blank)
            share[name] = (at, column[at])
        for name in (*_SUMS, *_PARTS, "length", "longest", "_held", "_spares", "_pulls"):
            share[name] = getattr(self, name)
        return share

    def merge(self, share: Mapping[str, Any]) -> None:
        """Take what other rows prove of the same offsets; in any order."""
        places = [share[name][0] for name in _BLANKS]
        self.reserve(max(int(at[-1]) + 1 if len(at) else 0 for at in places))
        at, lo = share["lo"]
        self.lo[at] = np.maximum(self.lo[at], lo)
        at, hi = share["hi"]
        self.hi[at] = np.minimum(self.hi[at], hi)
        self._write(*share["log"])
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + share[name])
        for name in _PARTS:
            getattr(self, name).extend(share[name])
        self._spares += [Spares(*part) for part in share["_spares"]]
        self._pulls += [Pulls(*part) for part in share["_pulls"]]
        for replica, parts in share["_held"].items():
            self._held.setdefault(replica, []).extend(parts)
        self.length = max(self.length, share["length"])
        pairs = zip(self.longest, share["longest"], strict=True)
        longest = (max(pair, key=lambda one: (one[0], -one[1])) for pair in pairs)
        self.longest = [(end, who) for end, who in longest]

    # -- giving ----------------------------------------------------------------------------

    def settle(self) -> bool:
        """Reserve all offsets; false if there were fewer sends than the queue is long."""
        spares = self.spares()
        self.attempts = self.acked + int(np.count_nonzero(~spares.failed))
        seen_off, _ = self.seen()
        self.length = max(self.length, int(seen_off.max(initial=-1)) + 1)
        fits = self.length <= self.attempts
        if not fits:
            self.limit = self.attempts
        self.reserve(min(self.length, self.attempts) + 1)
        return fits

    def open(self, limit: int | None) -> None:
        """Reserve all offsets of this chunk, up to the limit of the queue."""
        self.limit = limit
        seen_off, _ = self.seen()
        self.length = max(self.length, int(seen_off.max(initial=-1)) + 1)
        known = min(self.length, NEVER if limit is None else limit) - self.begin + 1
        self.reserve(max(known, 1) if self.size is None else min(max(known, 1), self.size))

    def far(self) -> tuple[I64, I64]:
        """Return offset and value of what was acknowledged beyond the limit, or the capacity."""
        beyond = np.flatnonzero(self.log[self.end :] != NOTHING) + self.end
        parts = [(far.off, far.value) for far in self._far if len(far.value)]
        off, value = _pairs([(beyond, self.log[beyond]), *parts])
        return off + self.begin, value

    @property
    def end(self) -> int:
        """How many offsets from `begin` on there are in this queue, up to the limit."""
        end = min(self.length, NEVER if self.limit is None else self.limit) - self.begin
        return max(min(end, len(self.lo) if self.size is None else min(self.size, len(self.lo))), 0)

    def spares(self) -> Spares:
        """Return the sends without an offset, in the order of their calls."""
        if len(self._spares) != 1:
            self._spares = [_joined(Spares, self._spares)]
        spares = self._spares[0]
        order = np.lexsort((spares.op_id, spares.call))
        return Spares(*(column[order] for column in spares))

    def pulls(self) -> Sequence[Pulls]:
        """Return the pulls that kept a hash, in parts."""
        return self._pulls

    def seen(self) -> tuple[I64, I64]:
        """Return offset and value of each message found by a pull."""
        return _pairs(self._seen)

    def held(self) -> dict[int, tuple[I64, I64]]:
        """Return offset and value of each message that a final read found, by replica."""
        return {replica: _pairs(self._held[replica]) for replica in sorted(self._held)}

    def lows(self) -> Sequence[tuple[I64, I64, I64, I64]]:
        """Return call, return, first offset kept and op id of reads that say one, in parts."""
        return self._lows


def _strides(table: Columns, names: Sequence[str]) -> Iterator[Columns]:
    columns = {name: table[name] for name in names}
    for begin in range(0, len(columns["op_id"]), STRIDE_ROWS):
        rows = slice(begin, begin + STRIDE_ROWS)
        yield {name: column[rows] for name, column in columns.items()}


def anchors(ops: Columns) -> I64:
    """Return an offset of each row, in whose chunk it is counted; `NOTHING` where it has none."""
    names = ("off", "max_off", "min_off")
    off, end, low = (ops[name].astype(np.int64, copy=False) for name in names)
    return np.maximum(np.where(off >= 0, off, np.where(end >= 0, end, low - 1)), NOTHING)


def distinct(column: I64) -> list[int]:
    """Return the different values of a column that is mostly sorted, sorted."""
    heads = np.append(0, np.flatnonzero(column[1:] != column[:-1]) + 1)
    values: list[int] = np.unique(column[heads]).tolist()
    return values


def _chosen(rows: Flags) -> I64 | slice:
    """Return an index of the rows that are set; where all are, one that copies nothing."""
    return slice(None) if rows.all() else np.flatnonzero(rows)


def _words(column: npt.NDArray[Any], rows: I64) -> I64:
    return column[rows].astype(np.int64, copy=False)


def _pairs(parts: Sequence[tuple[I64, I64]]) -> tuple[I64, I64]:
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return none, none
    off, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return off, value


def _joined(kind: Any, parts: Sequence[Any]) -> Any:
    if parts:
        return kind(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    none = np.zeros(0, dtype=np.int64)
    return kind(*[none] * len(kind._fields))


def repeated(values: I64) -> I64:
    """Return the values that are there more than once, sorted."""
    if not len(values):
        return values
    counters = values & ((1 << CLIENT_BITS) - 1)
    low = int(counters.min())
    span = int(counters.max()) - low + 1
    if span <= 8 * len(values) + SPARSE_MIN:
        met = np.zeros(span, dtype=np.bool_)
        met[counters - low] = True
        if np.count_nonzero(met) == len(values):
            return values[:0]
    ordered = np.sort(values)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
