"""One queue of a correct broker, played block by block in columns.

Operation i has its effect at instant i; its call and its return lie within half a turn of its
client around that, so a client does one thing at a time and as many overlap as there are clients.
What a block needs of those before is a few numbers and the last messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.history.columns import mix
from dledger.jepsen_like.history.operation import CLIENT_BITS, NEVER, NOTHING, F, Outcome

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

STEP_NS: Final = 1_000
"""From one effect to the next in a queue."""
LAG_MAX: Final = 64
"""Messages a pull may be behind the end of its queue."""
PULLED_MAX: Final = 32
"""Messages a pull may find."""
SHARES: Final = {
    F.SEND: 500,
    F.PULL: 360,
    F.MAX_OFFSET: 100,
    F.MIN_OFFSET: 20,
    F.COMMIT: 10,
    F.FETCH_COMMIT: 10,
}
"""Operations of each kind among a thousand."""
INFO_PER_MILLE: Final = 10
FAIL_PER_MILLE: Final = 10
EXPLICIT_PER_MILLE: Final = 5
"""Pulls among a thousand whose messages are kept one by one; the others keep their hash."""

_NUMBERS: Final = ("op_id", "process", "f", "outcome", "call_ns", "ret_ns", "off", "cnt")
_MORE: Final = ("max_off", "min_off", "value", "range_hash")


@dataclass(slots=True)
class Block:
    """Consecutive operations of one queue, and the messages they appended.

    Attributes:
        ops: Columns of `ops` that differ from row to row, in the order of the effects.
        at_ns: Instant of each effect.
        length: Messages in the queue when each operation had its effect.
        is_effective: Whether a send or a commit took effect.
        first_off: Offset of the first message of *log*.
        obs: Columns of `obs` of pulls: op id, offset, value.
        is_last: No block of this queue follows.
    """

    queue: int
    ops: dict[str, I64]
    at_ns: I64
    length: I64
    is_effective: Flags
    first_off: int
    log: I64
    obs: dict[str, I64]
    is_last: bool = False

    def rows(self, *fs: F, outcome: Outcome = Outcome.OK) -> I64:
        """Return the places of the rows of these kinds and this outcome."""
        wanted = np.isin(self.ops["f"], fs) & (self.ops["outcome"] == outcome)
        return np.flatnonzero(wanted)

    def append(self, f: F, **fields: int) -> int:
        """Add a row that ended well, after everything else; return its op id."""
        op_id = int(self.ops["op_id"].max()) + 1
        now = int(max(self.at_ns[-1], self.ops["call_ns"].max())) + 2 * STEP_NS
        ended = self.ops["ret_ns"][self.ops["ret_ns"] != NEVER]
        now = max(now, int(ended.max(initial=0)) + 1)
        row = dict.fromkeys((*_NUMBERS, *_MORE), NOTHING)
        row |= {"op_id": op_id, "process": int(self.ops["process"].max()) + 1, "f": f}
        row |= {"outcome": Outcome.OK, "call_ns": now, "ret_ns": now + 1, "cnt": 0, "range_hash": 0}
        for name, value in (row | fields).items():
            self.ops[name] = np.append(self.ops[name], value)
        self.at_ns = np.append(self.at_ns, now)
        self.length = np.append(self.length, self.length[-1])
        self.is_effective = np.append(self.is_effective, np.False_)
        return op_id


@dataclass(slots=True)
class QueueStream:
    """Plays one queue.

    Attributes:
        queue: Which; with *seed* and the number of a block it determines everything.
        seed: Of the history.
        stride: Added to the id of a client that is retired.
        first_op_id: Op ids are given from here on.
        block_ops: Operations of a block, at least one turn of all clients.
    """

    queue: int
    seed: int
    ops: int
    clients: range
    stride: int
    first_op_id: int
    begin_ns: int
    block_ops: int
    retired: I64 = field(init=False)
    _tail: I64 = field(init=False)
    _length: int = 0
    _committed: int = NOTHING

    def __post_init__(self) -> None:
        self.retired = np.zeros(len(self.clients), dtype=np.int64)
        self._tail = np.zeros(0, dtype=np.int64)

    def blocks(self) -> Iterator[Block]:
        """Yield the whole queue."""
        turn = len(self.clients)
        size = max(self.block_ops // turn, 1) * turn
        for number, begin in enumerate(range(0, self.ops, size)):
            rng = np.random.default_rng([self.seed, self.queue, number])
            block = self._block(rng, begin, min(size, self.ops - begin))
            block.is_last = begin + size >= self.ops
            yield block

    def _block(self, rng: np.random.Generator, begin: int, size: int) -> Block:
        turn = len(self.clients)
        index = np.arange(begin, begin + size, dtype=np.int64)
        f = np.array(list(SHARES), dtype=np.int64)[
            np.searchsorted(np.cumsum(list(SHARES.values())), rng.integers(0, 1000, size), "right")
        ]
        writes = (f == F.SEND) | (f == F.COMMIT)
        outcome, effective = _outcomes(rng, writes)
        half = STEP_NS * max(turn, 2) // 2 - 1
        at_ns = self.begin_ns + half + (index + 1) * (STEP_NS * max(2 // turn, 1))
        call_ns = at_ns - rng.integers(1, half + 1, size)
        ret_ns = at_ns + rng.integers(1, half + 1, size)
        ret_ns[outcome == Outcome.INFO] = NEVER
        process = self._processes(outcome, size)
        op_id = self.first_op_id + index

        appended = effective & (f == F.SEND)
        length = self._length + np.cumsum(appended)
        value = np.full(size, NOTHING, dtype=np.int64)
        sends = f == F.SEND
        value[sends] = process[sends] << CLIENT_BITS | op_id[sends]
        off = np.full(size, NOTHING, dtype=np.int64)
        acked = sends & (outcome == Outcome.OK)
        off[acked] = length[acked] - 1

        committed = np.maximum.accumulate(np.where(effective & (f == F.COMMIT), index, NOTHING))
        committed = np.maximum(committed, self._committed)
        off[f == F.COMMIT] = index[f == F.COMMIT]
        off[f == F.FETCH_COMMIT] = committed[f == F.FETCH_COMMIT]

        ops = {
            "op_id": op_id, "process": process, "f": f, "outcome": outcome, "call_ns": call_ns,
            "ret_ns": ret_ns, "off": off, "cnt": np.zeros(size, dtype=np.int64),
            "max_off": np.where(f == F.MAX_OFFSET, length, NOTHING),
            "min_off": np.where(f == F.MIN_OFFSET, 0, NOTHING),
            "value": value, "range_hash": np.zeros(size, dtype=np.int64),
        }  # fmt: skip
        log = value[appended]
        block = Block(self.queue, ops, at_ns, length, effective, self._length, log, {})
        self._pull(rng, block)
        self._length = int(length[-1]) if size else self._length
        self._committed = int(committed[-1]) if size else self._committed
        self._tail = np.concatenate((self._tail, log))[-LAG_MAX:]
        return block

    def _processes(self, outcome: I64, size: int) -> I64:
        """A client whose operation ended in no answer goes on under another id."""
        turn = len(self.clients)
        turns = -(-size // turn)
        ended = np.zeros(turns * turn, dtype=np.int64)
        ended[:size] = outcome == Outcome.INFO
        by_turn = ended.reshape(turns, turn)
        before = np.cumsum(by_turn, axis=0) - by_turn + self.retired
        self.retired = self.retired + by_turn.sum(axis=0)
        ids = np.asarray(self.clients, dtype=np.int64) + before * self.stride
        return ids.reshape(-1)[:size]

    def _pull(self, rng: np.random.Generator, block: Block) -> None:
        """Fill in what pulls asked for and found."""
        ops, rows = block.ops, np.flatnonzero(block.ops["f"] == F.PULL)
        count, length = len(rows), block.length[rows]
        off = np.maximum(length - rng.integers(0, LAG_MAX + 1, count), 0)
        found = np.minimum(length - off, rng.integers(0, PULLED_MAX + 1, count))
        off = np.where(found == 0, length, off)
        ops["off"][rows], ops["cnt"][rows] = off, found
        tells = (found == 0) | (rng.integers(0, 2, count) == 0)
        ops["max_off"][rows] = np.where(tells, length, NOTHING)

        values = np.concatenate((self._tail, block.log))
        begin = block.first_off - len(self._tail)
        words = mix(begin + np.arange(len(values), dtype=np.int64), values)
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))
        explicit = rng.integers(0, 1000, count) < EXPLICIT_PER_MILLE
        ranges = (sums[off + found - begin] - sums[off - begin]).view(np.int64)
        ops["range_hash"][rows] = np.where(explicit, 0, ranges)
        each = found[explicit]
        at = np.repeat(off[explicit] - np.cumsum(each) + each, each) + np.arange(each.sum())
        block.obs = {
            "op_id": np.repeat(ops["op_id"][rows[explicit]], each),
            "off": at,
            "value": values[at - begin],
        }


def _outcomes(rng: np.random.Generator, writes: Flags) -> tuple[I64, Flags]:
    """Return outcomes, and which writes took effect; reads end well."""
    drawn = rng.integers(0, 1000, len(writes))
    info = writes & (drawn < INFO_PER_MILLE)
    fail = writes & ~info & (drawn < INFO_PER_MILLE + FAIL_PER_MILLE)
    outcome = np.full(len(writes), Outcome.OK, dtype=np.int64)
    outcome[info], outcome[fail] = Outcome.INFO, Outcome.FAIL
    happened = rng.integers(0, 2, len(writes)) == 0
    return outcome, writes & ~fail & (~info | happened)
