"""A history as Jepsen records it: invocations and completions, paired to attempts; ours as one.

EDN or JSON: a map per line, or one vector of maps. Keywords and strings are read alike. Only what
clients did counts; the rows of the nemesis are passed over.

Rows of ours become a history of Jepsen's kafka workload, for other checkers to judge. A send
becomes a `:send`, a pull that found something a `:poll`. A pull names its offset itself, so an
`:assign` of nothing stands before it: its process goes on from nowhere. A send without an offset,
of a delayed message for example, is `:info`, and so is a half message: what it holds is appended
later, or never. Other operations have no counterpart and are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.foreign import edn
from dledger.jepsen_like.foreign.edn import Keyword, text_of
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

# ---------------------------------------------------------------------------------- read


Kind = Literal["ok", "info", "fail"]
Workload = Literal["kafka", "register", "set", "list-append"]

_TYPES: Final = ("invoke", "ok", "info", "fail")
_NUMBERED: Final = "has an index"
_NEMESIS: Final = "nemesis"


class RecordError(MQError):
    """A row is no operation of a history: the sentence names it."""


class Attempt(msgspec.Struct, frozen=True):
    """One operation of a client, from its invocation to its completion.

    Attributes:
        index: Of the completion in the history; of the invocation where there is none.
        process: Of the client.
        f: What was asked for.
        kind: ok, fail (it certainly did not happen), info (it may have).
        call: When it was invoked, in nanoseconds; 0 where the history has no invocation.
        ret: When it had completed; `NEVER` for info.
        asked: The value of the invocation.
        value: The value of the completion, of the invocation where that has none.
    """

    index: int
    process: Any
    f: str
    kind: Kind
    call: int
    ret: int
    asked: Any
    value: Any
    row: dict[str, Any] = {}


def word(value: Any) -> Any:
    """Return the name of a keyword, symbol or string, a leading colon left out; else *value*."""
    match value:
        case edn.Keyword(name) | edn.Symbol(name):
            return name
        case str():
            return value.removeprefix(":")
        case _:
            return value


def read_text(text: str) -> list[Attempt]:
    """Return the attempts of a history in EDN or JSON, in the order of their invocations.

    Raises:
        EdnError: The text is neither.
        RecordError: A row is no operation, or a process has two operations at once.
    """
    rows = [_row(value, at) for at, value in enumerate(_maps(text))]
    _check_indexes(rows)
    return attempts_of(rows)


def _maps(text: str) -> list[Any]:
    found = _json(text)
    if found is None:
        found = list(edn.values(text))
    while len(found) == 1 and not isinstance(_bare(found[0]), dict):
        inner = _bare(found[0])
        if not isinstance(inner, tuple | list):
            break
        found = list(inner)
    return found


def _json(text: str) -> list[Any] | None:
    """Return the values of JSON, one or one a line; None: it is none.

    Raises:
        RecordError: It begins with an object a line, and one line is none.
    """
    try:
        return [json.loads(text, object_pairs_hook=_object)]
    except (ValueError, RecursionError):
        pass
    found: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line, object_pairs_hook=_object))
        except (ValueError, RecursionError):
            if found and isinstance(found[0], dict) and found[0]:
                raise RecordError(f"line {number} is no JSON") from None
            return None
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RecordError("an object has a key twice")
    return found


def _bare(value: Any) -> Any:
    while isinstance(value, edn.Tagged):
        value = value.value
    return value


def _settled(value: Any, at: int, depth: int = 0) -> Any:
    """Return *value* as one of EDN in which true is no 1, as in Python.

    Raises:
        RecordError: It is nested too deep to be compared, or has a text that is none.
    """
    match value:
        case bool():
            return edn.Symbol("true" if value else "false")
        case str():
            if not value.isascii() and _HALF.search(value):
                raise RecordError(f"row {at} holds half of a character")
            return value
        case dict() | tuple() | list() | frozenset() | edn.Tagged():
            if depth == edn.DEPTH_MAX:
                raise RecordError(f"row {at} has values nested more than {depth} deep")
            return _settled_parts(value, at, depth + 1)
        case _:
            return value


_HALF: Final = re.compile("[\ud800-\udfff]")


def _settled_parts(value: Any, at: int, depth: int) -> Any:
    if isinstance(value, edn.Tagged):
        return edn.Tagged(value.tag, _settled(value.value, at, depth))
    if isinstance(value, dict):
        return {_settled(k, at, depth): _settled(v, at, depth) for k, v in value.items()}
    kind = frozenset if isinstance(value, frozenset) else tuple
    return kind([_settled(one, at, depth) for one in value])


def _row(value: Any, at: int) -> dict[str, Any]:
    given = _bare(value)
    if not isinstance(given, dict):
        raise RecordError(f"row {at} is no map")
    given = _settled(given, at)
    row = {word(key): inner for key, inner in given.items() if isinstance(word(key), str)}
    kind = word(row.get("type"))
    if kind not in _TYPES:
        raise RecordError(f"row {at} has the type {kind!r}, none of {', '.join(_TYPES)}")
    index, time = row.get("index", at), row.get("time", -1)
    if not _is_integer(index) or not _is_integer(time):
        raise RecordError(f"row {at} has an index or a time that is no integer")
    f = word(row.get("f"))
    return {**row, "type": kind, "f": f, "index": index, "time": time, _NUMBERED: "index" in row}


def _check_indexes(rows: list[dict[str, Any]]) -> None:
    """See that no two rows have one index; below 0 it is none.

    Raises:
        RecordError: Two have: a row is there twice, or is of another history.
    """
    met: dict[int, int] = {}
    for at, row in enumerate(rows):
        if row.pop(_NUMBERED) and row["index"] >= 0:
            first = met.setdefault(row["index"], at)
            if first != at:
                raise RecordError(f"rows {first} and {at} both have the index {row['index']}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -NEVER < value < NEVER


def attempts_of(rows: Iterable[dict[str, Any]]) -> list[Attempt]:
    """Return the attempts of rows; stamps rise strictly, so that the order of rows decides.

    Raises:
        RecordError: A process has two operations at once, or completes another than it invoked.
    """
    found: list[Attempt] = []
    begun: dict[Any, tuple[dict[str, Any], int]] = {}
    now = 0
    for row in rows:
        process = _frozen(row.get("process"))
        if word(process) == _NEMESIS:
            continue
        now = max(now + 1, row["time"] + 1)
        if row["type"] == "invoke":
            if process in begun:
                raise RecordError(
                    f"process {process} invokes row {row['index']} before its row "
                    f"{begun[process][0]['index']} has completed"
                )
            begun[process] = (row, now)
        else:
            found.append(_attempt(*begun.pop(process, (row, 0)), row, now))
    found += [_attempt(row, call, {**row, "type": "info"}, NEVER) for row, call in begun.values()]
    return sorted(found, key=lambda one: (one.call, one.index))


def _frozen(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise RecordError("a process is neither a number nor a name") from None
    return value


def _attempt(begin: dict[str, Any], call: int, end: dict[str, Any], ret: int) -> Attempt:
    if begin["f"] != end["f"]:
        raise RecordError(
            f"row {end['index']} completes {end['f']!r}, and its process had invoked "
            f"{begin['f']!r} in row {begin['index']}"
        )
    asked = begin.get("value")
    value = end.get("value")
    return Attempt(
        end["index"],
        begin.get("process"),
        str(begin["f"]),
        end["type"],
        call,
        NEVER if end["type"] == "info" else ret,
        asked,
        asked if value is None else value,
        end,
    )


def micro_operations(attempt: Attempt, value: Any) -> list[tuple[Any, ...]]:
    """Return the parts of a transaction, each with a plain name in front.

    Raises:
        RecordError: It has none.
    """
    if not isinstance(value, tuple | list):
        raise RecordError(f"row {attempt.index} holds no list of micro-operations")
    found: list[tuple[Any, ...]] = []
    for part in value:
        if not isinstance(part, tuple | list) or not part or not isinstance(word(part[0]), str):
            raise RecordError(f"row {attempt.index} holds a micro-operation without a name")
        found.append((word(part[0]), *part[1:]))
    return found


def key_of(value: Any) -> str:
    """Return a key as text: that of a map in JSON is a string where others are numbers."""
    plain = word(value)
    return plain if isinstance(plain, str) else edn_text(plain)


def edn_text(value: Any) -> str:
    """Return a value as a person reads it."""
    try:
        return edn.text_of(value)
    except (TypeError, RecursionError):
        return str(type(value).__name__)


_BY_F: Final[tuple[tuple[Workload, frozenset[str]], ...]] = (
    (
        "kafka",
        frozenset({"send", "poll", "subscribe", "assign", "crash", "debug-topic-partitions"}),
    ),
    ("register", frozenset({"read", "write", "cas"})),
    ("set", frozenset({"add", "read"})),
)


def workload_of(attempts: list[Attempt]) -> Workload:
    """Return which workload made a history.

    Raises:
        RecordError: No workload that can be judged did.
    """
    parts = {name for one in attempts for name in _names(one)}
    if parts & {"append", "r"} and not parts & {"send", "poll"}:
        return "list-append"
    if parts & {"send", "poll"}:
        return "kafka"
    fs = {one.f for one in attempts}
    if "add" in fs:
        return "set"
    if fs & {"write", "cas"}:
        return "register"
    for workload, names in _BY_F:
        if fs and fs <= names:
            return workload
    raise RecordError(
        f"operations are {', '.join(sorted(fs)) or 'none'}: no kafka, register, set or list-append"
    )


def _names(attempt: Attempt) -> set[str]:
    if attempt.f not in ("txn", "send", "poll", "None"):
        return set()
    try:
        return {part[0] for part in micro_operations(attempt, attempt.asked)}
    except RecordError:
        return set()


# ---------------------------------------------------------------------------------- written


_SENDS: Final = (F.SEND, F.HALF)
_COMPLETIONS: Final = {Outcome.OK: "ok", Outcome.INFO: "info", Outcome.FAIL: "fail"}


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
        asked, given = _send(op) if is_send else _poll(op)
        f = "send" if is_send else "poll"
        if not is_send:
            yield _Event(op.call_ns, 4 * at, process, "invoke", "assign", [])
            yield _Event(op.call_ns, 4 * at + 1, process, "ok", "assign", [])
        yield _Event(op.call_ns, 4 * at + 2, process, "invoke", f, asked)
        if op.ret_ns != NEVER:
            yield _Event(op.ret_ns, 4 * at + 3, process, kind, f, given)


def _kind(op: Operation) -> str:
    if op.outcome == Outcome.OK and (op.f == F.HALF or (op.f == F.SEND and op.off == NOTHING)):
        return "info"
    return _COMPLETIONS[Outcome(op.outcome)]


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
