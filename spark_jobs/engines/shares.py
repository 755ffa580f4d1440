"""What a split of the tables contributes: facts by queue and chunk of offsets, merged and judged.

Any split of the rows gives the same facts, so rows are never shuffled: each task gathers facts of
the rows it reads, and the facts of a chunk come together in another task. Pure; no Spark here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger.jepsen_like.checkers.kernel.cut import (
    ChunkReport,
    chunk_report_of,
    obs_routes,
    report_of,
    routes,
)
from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    OBS_COLUMNS,
    OPS_COLUMNS,
    QUEUE_OPERATIONS,
    SPARSE_MIN,
    Columns,
    QueueFacts,
    Spares,
    anchors,
)
from dledger.jepsen_like.checkers.kernel.judge import acknowledged
from dledger.jepsen_like.checkers.kernel.source import Queue, Replicas
from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.history.operation import CLIENT_BITS
from dledger.jepsen_like.history.sums import added, sum_rows

GATHERED_MAX: Final = 256 << 20
"""Bytes of facts that a task gathers before it hands them on."""
_ROW_BYTES: Final = 40
"""Of a row that is kept beside the facts of offsets, at most about."""


class Share(NamedTuple):
    """Facts of one chunk of a queue, from some rows.

    Attributes:
        chunk: Its first offset, in widths of a chunk.
        facts: Packed; empty: chunk 0 is to know that the queue has others.
    """

    queue: Queue
    chunk: int
    facts: bytes


SUMMED: Final[Queue] = ("", -1)
"""In place of a queue: what is shared are the sums of the tables."""


def rows_key(number: int) -> Queue:
    """Return what stands in place of a queue: what is shared are rows of want *number*."""
    return "", SUMMED[1] - 1 - number


def number_of(key: Queue) -> int:
    """Return the number of the want; negative: it is another share."""
    return -1 if key[0] else SUMMED[1] - 1 - key[1]


class Sharer:
    """Gathers the facts of the batches of one task, and the sums of their rows.

    *only*: other queues are left out; None: all are wanted.
    """

    def __init__(self, width: int, replicas: Replicas, only: Queue | None = None) -> None:
        self._width, self._replicas, self._only = width, replicas, only
        self._facts: dict[tuple[Queue, int], QueueFacts] = {}
        self._rows = 0
        self._sums: dict[str, int] = {}

    def add(self, table: str, batch: Batch) -> None:
        """Add rows of `ops` or `obs`: all columns, unless one queue alone is wanted."""
        if self._only is None:
            self._sums[table] = added((self._sums.get(table, 0), sum_rows(table, batch)))
        if table == "ops":
            for queue, columns in batch.by_queue(OPS_COLUMNS):
                if queue[0] and queue[1] >= 0 and self._only in (None, queue):
                    self._add_ops(queue, columns)
        else:
            for queue, columns in batch.by_queue(OBS_COLUMNS, self._replicas):
                if queue[1] >= 0 and self._only in (None, queue):
                    for chunk, rows in _pieces(columns, self._obs_chunks(columns)):
                        self._of(queue, chunk).add_obs(rows)
        self._rows += batch.num_rows

    def _add_ops(self, queue: Queue, columns: Columns) -> None:
        used = columns["f"] <= max(QUEUE_OPERATIONS)
        if not used.all():
            rows = np.flatnonzero(used)
            columns = {name: column[rows] for name, column in columns.items()}
        if not len(columns["f"]):
            return
        chunk = self._one_chunk(columns)
        if chunk is not None:
            self._of(queue, chunk).add_ops(columns)
            return
        for chunk, part in _pieces(columns, routes(columns, self._width)):
            self._of(queue, chunk).add_ops(part)

    def _one_chunk(self, columns: Columns) -> int | None:
        """Return the chunk that all rows concern; None: there are several."""
        names = ("off", "max_off", "min_off")
        off, end, kept = (columns[name].astype(np.int64, copy=False) for name in names)
        anchor = anchors(columns)
        before = np.where(kept > 0, kept - 1, anchor)
        low = min(int(part.min()) for part in (anchor, before, np.where(end > 0, end - 1, off)))
        high = max(int((off + np.maximum(columns["cnt"], 0)).max()), int(end.max()), 0)
        high = max(high, int(before.max()))
        chunk = max(low, 0) // self._width
        return chunk if high // self._width == chunk else None

    def _obs_chunks(self, columns: Columns) -> tuple[I64, I64]:
        chunks = obs_routes(columns, self._width)
        order = np.argsort(chunks, kind="stable")
        return order, chunks[order]

    def _of(self, queue: Queue, chunk: int) -> QueueFacts:
        facts = self._facts.get((queue, chunk))
        if facts is None:
            facts = self._facts[queue, chunk] = QueueFacts(chunk * self._width, self._width)
        return facts

    @property
    def is_full(self) -> bool:
        """Whether what is gathered is to be taken now."""
        kept = sum(facts.capacity_bytes for facts in self._facts.values())
        return kept + self._rows * _ROW_BYTES > GATHERED_MAX

    def take(self) -> list[Share]:
        """Return what was gathered since the last time."""
        found = [Share(q, chunk, packed(facts)) for (q, chunk), facts in self._facts.items()]
        cut = {queue for queue, chunk in self._facts if chunk}
        found += [Share(queue, 0, b"") for queue in sorted(cut)]
        self._facts, self._rows = {}, 0
        return found

    def sums(self) -> Share:
        """Return the sums of all rows that were added."""
        return Share(SUMMED, 0, msgspec.msgpack.encode(self._sums))


def _pieces(columns: Columns, routed: tuple[I64, I64]) -> Iterator[tuple[int, Columns]]:
    """Yield the rows of each chunk."""
    rows, chunks = routed
    if not len(chunks):
        return
    if chunks[0] == chunks[-1] and len(rows) == len(columns["op_id"]):
        yield int(chunks[0]), columns
        return
    cuts = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
    for part in np.split(np.arange(len(rows)), cuts):
        its = rows[part]
        yield int(chunks[part[0]]), {name: column[its] for name, column in columns.items()}


_NARROW: Final = 1
"""The kind of an array in bytes."""


def packed(facts: QueueFacts) -> bytes:
    """Return facts as bytes: about 15 for each offset that something is known of."""
    return msgspec.msgpack.encode(facts.share(), enc_hook=_array_bytes)


def _array_bytes(array: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_NARROW, narrowed(array.astype(np.int64, copy=False)))


def _array(_: int, data: memoryview) -> Any:
    return widened(data)


class Counters(msgspec.Struct):
    """The counters of the values of a chunk as bits: whether two chunks may hold one value.

    Attributes:
        low: Counter of the first bit; a multiple of 8.
        bits: Packed.
        is_exact: The chunk holds each counter once, and they are dense.
    """

    low: int = 0
    bits: bytes = b""
    is_exact: bool = True


def counters_of(values: I64) -> Counters:
    """Return the counters of *values*."""
    if not len(values):
        return Counters()
    counters = values & ((1 << CLIENT_BITS) - 1)
    low = int(counters.min()) & ~7
    span = int(counters.max()) - low + 1
    if span > 8 * len(values) + SPARSE_MIN:
        return Counters(is_exact=False)
    met = np.zeros(span, dtype=np.bool_)
    met[counters - low] = True
    if np.count_nonzero(met) != len(values):
        return Counters(is_exact=False)
    return Counters(low, np.packbits(met, bitorder="little").tobytes())


def may_repeat(chunks: Sequence[Counters], spares: I64) -> bool:
    """Whether a value may be in two chunks, or twice among *spares*, or there and in a chunk."""
    if not all(one.is_exact for one in chunks):
        return True
    low = min((one.low for one in chunks if one.bits), default=0) >> 3
    high = max(((one.low >> 3) + len(one.bits) for one in chunks if one.bits), default=0)
    if high - low > 8 * sum(len(one.bits) for one in chunks) + SPARSE_MIN:
        return True
    met = np.zeros(high - low, dtype=np.uint8)
    for one in chunks:
        bits = np.frombuffer(one.bits, dtype=np.uint8)
        at = (one.low >> 3) - low
        here = met[at : at + len(bits)]
        if (here & bits).any():
            return True
        here |= bits
    # Spares are few and far apart: they are sorted, where bits would be mostly empty.
    alone = np.unique(spares & ((1 << CLIENT_BITS) - 1))
    inside = alone[(alone >= low << 3) & (alone < high << 3)]
    known = met[(inside >> 3) - low] >> (inside & 7).astype(np.uint8) & 1
    return len(alone) < len(spares) or bool(known.any())


class CutReport(msgspec.Struct):
    """A chunk of a queue that has several."""

    report: ChunkReport
    counters: Counters


WHOLE: Final = 0
"""A report of a queue in one chunk."""
CUT: Final = 1
"""A `CutReport`."""
SUMS: Final = 2
"""The sums of some rows, by table."""
ROWS: Final = 3
"""Rows of a want."""
Judge = Callable[[Queue, int, QueueFacts, bool], tuple[int, Any]]
"""Given a queue, a chunk, its facts and whether the queue has several: which report it is."""


def joined(shares: Iterable[Share], width: int, judge: Judge) -> Iterator[tuple[Queue, int, bytes]]:
    """Yield the report of each chunk; of a chunk all shares are given, in any order."""
    chunks: dict[tuple[Queue, int], QueueFacts] = {}
    cut: set[Queue] = set()
    for share in shares:
        if share.queue == SUMMED:
            yield SUMMED, SUMS, share.facts
            continue
        if number_of(share.queue) >= 0:
            yield share.queue, ROWS, share.facts
            continue
        key = (share.queue, share.chunk)
        facts = chunks.get(key)
        if facts is None:
            facts = chunks[key] = QueueFacts(share.chunk * width, width)
        if share.facts:
            facts.merge(msgspec.msgpack.decode(share.facts, ext_hook=_array))
        if share.chunk or not share.facts:
            cut.add(share.queue)
    for key in sorted(chunks):
        yield _judged(key, chunks.pop(key), key[0] in cut, judge)


def _judged(
    key: tuple[Queue, int], facts: QueueFacts, is_cut: bool, judge: Judge
) -> tuple[Queue, int, bytes]:
    kind, report = judge(*key, facts, is_cut)
    return key[0], kind, msgspec.msgpack.encode(report)


def first_look(replicas: Replicas, added: Mapping[Queue, Spares], rows: int | None = None) -> Judge:
    """Return what judges queues in one chunk, and gives the chunks of the others.

    Args:
        added: What transactions appended.
        rows: Of the history: no queue has more sends, and one that is longer is cut at their
            number, so a wrong count must not fill the memory with chunks of nothing.
    """

    def judge(queue: Queue, chunk: int, facts: QueueFacts, is_cut: bool) -> tuple[int, Any]:
        if is_cut:
            return CUT, cut_report(queue, facts, replicas, rows)
        facts.size = None
        if queue in added:
            facts.add_spares(added[queue])
        return WHOLE, report_of(queue, facts, replicas)

    return judge


def cut_report(queue: Queue, facts: QueueFacts, replicas: Replicas, limit: int | None) -> CutReport:
    """Return one chunk of several. Its facts are used up by it."""
    facts.open(limit)
    counters = counters_of(acknowledged(facts))
    return CutReport(chunk_report_of(queue, facts, replicas, limit), counters)


# ------------------------------------------------------------------ arrays of 64 bits in few bytes


CODEC: Final = "zstd"
SIZE_BYTES: Final = 8
"""In front of an array: its length."""


def narrowed(array: I64) -> bytes:
    """Return an array as bytes: of all steps the lowest byte, then the next, compressed."""
    steps = np.diff(array, prepend=np.int64(0))
    planes = np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 8).T)
    packed_steps: bytes = pa.compress(planes.data, CODEC, asbytes=True)
    return len(array).to_bytes(SIZE_BYTES, "little") + packed_steps


def widened(data: bytes | memoryview) -> npt.NDArray[np.int64]:
    """Return the array that `narrowed` made bytes of."""
    size = int.from_bytes(data[:SIZE_BYTES], "little")
    planes = np.frombuffer(pa.decompress(data[SIZE_BYTES:], 8 * size, CODEC), np.uint8)
    steps = np.ascontiguousarray(planes.reshape(8, size).T).view(np.int64)
    return np.cumsum(steps)
