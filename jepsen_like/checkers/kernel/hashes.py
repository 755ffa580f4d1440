"""Did pulls find what is there? Those that kept a hash of their messages are compared with the log.

The hash of a range is a difference of two sums over the beginning of the log, so each pull costs
two look-ups, however many messages it found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jepsen_like.checkers.kernel.facts import I64, STRIDE_ROWS, Flags, Pulls, QueueFacts
from jepsen_like.history.columns import mix
from jepsen_like.history.operation import NOTHING


class Compared(NamedTuple):
    """What became of pulls.

    Attributes:
        wrong: Those that found something else than was there.
        unproved: How many could not be compared: a message of theirs is unknown.
        cut: Those that reach into other chunks.
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
