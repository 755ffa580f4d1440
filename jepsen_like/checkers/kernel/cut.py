"""A queue too long for one task, cut into chunks of offsets.

Pass one: each chunk is gathered by itself, and the few numbers of all chunks decide, because bounds
are carried over borders as maxima and minima. Pass two, only where something is wrong: the chunks
are looked at again with what was carried to them, and name it. Equal to the kernel in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.chunks import (
    Answer,
    Ask,
    Chunk,
    chunk_of,
    look_again,
    pack,
    spares_in,
    unpack,
)
from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    SUSPECTS_MAX,
    Columns,
    QueueFacts,
    Spares,
    anchors,
)
from dledger.jepsen_like.checkers.kernel.home import (
    Home,
    echo_of,
    home_of,
    join_homes,
    spare_outcomes,
)
from dledger.jepsen_like.checkers.kernel.judge import Judged, attempts_of, judge_chunks, judge_queue
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas
from dledger.jepsen_like.history.operation import NOTHING, F, Level, Outcome

CHUNK_OFFSETS: Final = 1 << 20
"""Offsets of a chunk: 25 MB of facts, and enough chunks of a hot queue for every core."""


class ChunkReport(msgspec.Struct):
    """One chunk after pass one."""

    chunk: Chunk
    home: Home


class Passes(Protocol):
    """How the rows of one queue reach the chunks."""

    def first(self, limit: int | None) -> Sequence[ChunkReport]:
        """Return each chunk. *limit*: the queue is cut there."""
        ...

    def again(self, asks: dict[int, Ask], limit: int | None) -> Sequence[Answer]:
        """Return what each chunk answers; asks by the first offset of a chunk."""
        ...

    def repeated(self, added: I64) -> I64:
        """Return values of two sends or at two acknowledged offsets, `SUSPECTS_MAX` + 1 at most."""
        ...


def report_of(queue: Queue, facts: QueueFacts, replicas: Replicas) -> QueueReport:
    """Judge one queue whose facts are complete; they are used up by it."""
    begins = replicas.begins.get(queue, ())
    facts.settle()
    home = home_of(facts, dict(begins), replicas.chosen, [replica for replica, _ in begins])
    return QueueReport(*queue, judge_queue(facts), home)


def chunk_report_of(
    queue: Queue, facts: QueueFacts, replicas: Replicas, limit: int | None
) -> ChunkReport:
    """Return one chunk in pass one. Its facts are used up by it."""
    begins = replicas.begins.get(queue, ())
    facts.open(limit)
    home = home_of(facts, dict(begins), replicas.chosen, [replica for replica, _ in begins])
    home.spare = home.spare_outcome = b""
    return ChunkReport(chunk_of(facts), home)


def answer_of(facts: QueueFacts, replicas: Replicas, ask: Ask, limit: int | None) -> Answer:
    """Return what one chunk answers in pass two. Its facts are used up by it."""
    facts.open(limit)
    answer = look_again(facts, ask)
    if ask.strange:
        among = np.frombuffer(ask.strange, dtype=np.int64)
        answer.echo = echo_of(facts, replicas.chosen, among).tobytes()
    return answer


def judge_cut(
    queue: Queue, passes: Passes, added: Spares | None, replicas: Replicas
) -> QueueReport:
    """Judge one queue from its chunks."""
    limit: int | None = None
    reports = _first(passes, limit, added)
    length, attempts = attempts_of([report.chunk for report in reports])
    if length > attempts:
        limit = attempts
        reports = _first(passes, limit, added)
    chunks = [report.chunk for report in reports]
    none = np.zeros(0, dtype=np.int64)
    again = passes.repeated(none if added is None else added.value[~added.failed])
    home = _home(reports, replicas, queue)
    strange = _maybe_home(home, again)

    def look(asks: Sequence[Ask]) -> Sequence[Answer]:
        known = {chunk.begin: ask for chunk, ask in zip(chunks, asks, strict=True)}
        return passes.again(known, limit)

    judged: Judged = judge_chunks(chunks, again, look)
    if len(strange) and len(chunks) > 1:
        ask = Ask(strange=strange.tobytes())
        answers = passes.again({chunk.begin: ask for chunk in chunks}, limit)
        echo = [np.frombuffer(answer.echo, dtype=np.int64) for answer in answers]
        home.echo = np.unique(np.concatenate(echo)).tobytes()
    return QueueReport(*queue, judged, home)


def _first(passes: Passes, limit: int | None, added: Spares | None) -> list[ChunkReport]:
    reports = sorted(passes.first(limit), key=lambda report: report.chunk.begin)
    if added is not None and reports:
        chunk = reports[0].chunk
        every = (unpack(Spares, [chunk.spares]), added)
        chunk.spares = pack(np.concatenate(column) for column in zip(*every, strict=True))
        chunk.sends += len(added.op_id)
    return reports


def _home(reports: Sequence[ChunkReport], replicas: Replicas, queue: Queue) -> Home:
    begins = replicas.begins.get(queue, ())
    home = join_homes([report.home for report in reports], [replica for replica, _ in begins])
    spares = spares_in([report.chunk for report in reports])
    home.spare = spares.value.tobytes()
    begin = dict(begins).get(replicas.chosen, NOTHING)
    home.spare_outcome = spare_outcomes(spares, begin, spares.value[:0])
    return home


def _maybe_home(home: Home, again: I64) -> I64:
    """Return strange values that may have been acknowledged elsewhere, sorted."""
    strange = np.unique(np.frombuffer(home.strange, dtype=np.int64))
    if len(again) > SUSPECTS_MAX:
        return strange
    spare, ended = np.frombuffer(home.spare, np.int64), np.frombuffer(home.spare_outcome, np.int8)
    spare = np.setdiff1d(spare[ended != Outcome.FAIL], again)
    return np.setdiff1d(strange, spare)


def routes(ops: Columns, width: int) -> tuple[I64, I64]:
    """Return rows of `ops` and the chunks they concern; a row may concern several.

    Args:
        ops: Rows of one queue; those without an offset concern chunk 0.
        width: Offsets of a chunk.
    """
    every = anchors(ops)
    parts = [(np.arange(len(every), dtype=np.int64), np.maximum(every, 0) // width)]
    f, end, off = ops["f"], ops["max_off"], ops["off"]
    is_ok = ops["outcome"] == Outcome.OK
    is_pull = f == F.PULL
    current = is_ok & (ops["level"] == Level.LINEARIZABLE)
    reads = current & (is_pull | (f == F.MAX_OFFSET))
    lows = current & (reads | (f == F.MIN_OFFSET)) & (ops["min_off"] > 0)
    for which, place in (
        (reads & is_pull & (ops["cnt"] > 0) & (off >= 0), off + ops["cnt"] - 1),
        (reads & (end > 0), end - 1),
        (reads & (end >= 0), end),
        (lows, ops["min_off"] - 1),
    ):
        rows = np.flatnonzero(which)
        parts.append((rows, place[rows].astype(np.int64) // width))
    hashed = is_ok & is_pull & (ops["range_hash"] != 0) & (ops["cnt"] > 0) & (off >= 0)
    parts.append(_covered(np.flatnonzero(hashed), off, ops["cnt"], width))
    rows, chunk = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((rows, chunk))
    rows, chunk = rows[order], chunk[order]
    new = np.append(True, (rows[1:] != rows[:-1]) | (chunk[1:] != chunk[:-1]))[: len(rows)]
    return rows[new], chunk[new]


def _covered(rows: I64, off: Any, count: Any, width: int) -> tuple[I64, I64]:
    """Return each row once for every chunk that its range reaches into."""
    first = off[rows].astype(np.int64) // width
    last = (off[rows].astype(np.int64) + count[rows] - 1) // width
    each = last - first + 1
    begin = np.repeat(first - (np.cumsum(each) - each), each)
    return np.repeat(rows, each), begin + np.arange(len(begin), dtype=np.int64)


def obs_routes(obs: Columns, width: int) -> I64:
    """Return the chunk of each row of `obs`."""
    chunk: I64 = np.maximum(obs["off"], 0) // width
    return chunk
