"""Rows of ours as a history of Jepsen's kafka workload, for other checkers to judge.

A send becomes a `:send`, a pull that found something a `:poll`. A pull names its offset itself, so
an `:assign` of nothing stands before it: its process goes on from nowhere. A send without an
offset, of a delayed message for example, is `:info`, and so is a half message: what it holds is
appended later, or never. Other operations have no counterpart and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from commitlog.errors import MQError
from jepsen_like.foreign.edn import Keyword, text_of
from jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

_SENDS: Final = (F.SEND, F.HALF)
_TYPES: Final = {Outcome.OK: "ok", Outcome.INFO: "info", Outcome.FAIL: "fail"}


class _Event(NamedTuple):
    at_ns: int
    order: int
    process: int
    kind: str
    f: str
    value: Any


class HashedPullError(MQError):
    """A pull is kept as a hash of what it found: no other checker can read it."""


def lines(operations: Iterable[Operation]) -> Iterator[str]:
    """Yield the history line by line, in the order of time.

    Raises:
        HashedPullError: A pull does not hold what it found.
    """
    rows = sorted(
        (op for op in operations if op.f in _SENDS or op.f == F.PULL),
        key=lambda op: (op.call_ns, op.op_id),
    )
    hashed = sum(op.f == F.PULL and op.cnt > len(op.values) for op in rows)
    if hashed:
        raise HashedPullError(f"{hashed:,} pulls are kept as a hash of what they found")
    events = sorted(_events(rows))
    for index, event in enumerate(events):
        row = {
            "index": index,
            "time": event.at_ns,
            "type": Keyword(event.kind),
            "process": event.process,
            "f": Keyword(event.f),
            "value": event.value,
        }
        yield text_of({Keyword(name): value for name, value in row.items()})


def _events(rows: list[Operation]) -> Iterator[_Event]:
    free_ns: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, int], int] = {}
    for at, op in enumerate(rows):
        lane = 0
        while free_ns.get((op.process, lane), -1) >= op.call_ns:
            lane += 1
        kind = _kind(op)
        free_ns[op.process, lane] = NEVER if kind == "info" else op.ret_ns
        process = numbers.setdefault((op.process, lane), len(numbers))
        is_send = op.f in _SENDS
        asked, told = _send(op) if is_send else _poll(op)
        f = "send" if is_send else "poll"
        if not is_send:
            yield _Event(op.call_ns, 4 * at, process, "invoke", "assign", [])
            yield _Event(op.call_ns, 4 * at + 1, process, "ok", "assign", [])
        yield _Event(op.call_ns, 4 * at + 2, process, "invoke", f, asked)
        if op.ret_ns != NEVER:
            yield _Event(op.ret_ns, 4 * at + 3, process, kind, f, told)


def _kind(op: Operation) -> str:
    if op.outcome == Outcome.OK and (op.f == F.HALF or (op.f == F.SEND and op.off == NOTHING)):
        return "info"
    return _TYPES[Outcome(op.outcome)]


def _key(op: Operation) -> str:
    return f"{op.topic}/{op.queue}"


def _send(op: Operation) -> tuple[Any, Any]:
    asked = [[Keyword("send"), _key(op), op.value]]
    if _kind(op) != "ok":
        return asked, asked
    return asked, [[Keyword("send"), _key(op), [op.off, op.value]]]


def _poll(op: Operation) -> tuple[Any, Any]:
    asked = [[Keyword("poll")]]
    if op.outcome != Outcome.OK:
        return asked, asked
    found = [[off, value] for off, value in enumerate(op.values, op.off)]
    return asked, [[Keyword("poll"), {_key(op): found} if found else {}]]
