"""A replicated table: rows by key, which of them changed, and their form in a snapshot.

Spec: docs/internals/state.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, Final, Generic, NamedTuple, TypeVar

import cbor2
import msgspec

K = TypeVar("K")
R = TypeVar("R")

ARRAY: Final = 0x80
MAP: Final = 0xA0


class StateChange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a record of the state topic changes."""


def plain(value: Any) -> Any:
    """Return a record or a row as maps, lists, numbers, texts and bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def as_it_is(row: Any) -> Any:
    """Return *row*."""
    return row


@dataclass(frozen=True, eq=False)
class Form(Generic[K, R]):
    """What a table's rows are, here and in a snapshot.

    Attributes:
        name: In a snapshot.
        key: Type of a key; keys have an order.
        row: Type of a row in a snapshot, which refuses fields that it does not know.
        copied: Copies a row on the event loop; what it returns shares nothing that changes.
        encoded: Makes of a copy what CBOR can encode; in a worker.
        decoded: Makes a row of what a snapshot has.
        in_order: The order of the rows is state: a row that is set is the last. The order of
            other tables depends on the replica, and a snapshot has their rows sorted.
        is_hint: The rows only save work, and may differ between equal tables.
        names: Places in a key; rows are found by the name that stands there.
        parts: How many parts a row has; `Table.total` has the sum.
    """

    name: str
    key: Any
    row: Any
    copied: Callable[[R], Any] = as_it_is
    encoded: Callable[[Any], Any] = plain
    decoded: Callable[[Any], R] = as_it_is
    in_order: bool = False
    is_hint: bool = False
    names: tuple[int, ...] = ()
    parts: Callable[[R], int] | None = None

    def table(self) -> Table[K, R]:
        """Return an empty table."""
        return Table(self)


class TableCut(NamedTuple):
    """Copies of rows of one table, and keys that have no row any more."""

    form: Form[Any, Any]
    rows: list[tuple[Any, Any]]
    removed: list[Any]


class Table(dict[K, R]):
    """Rows by key.

    Rows are set by assignment and removed by `del` and `pop`: these mark what changed. After a
    change inside a row call `mark`.

    Attributes:
        changed: Keys of rows that changed since the last cut, the newest change last.
        keys_of: Of each of the form's `names`: name → keys that have it, in the order they came; no
            name without a key.
        total: Sum of the form's `parts`.
    """

    __slots__ = ("_parts", "changed", "form", "keys_of", "total")

    def __init__(self, form: Form[K, R]) -> None:
        super().__init__()
        self.form = form
        self.changed: dict[K, None] = {}
        self.keys_of: dict[int, dict[str, dict[K, None]]] = {place: {} for place in form.names}
        self.total = 0
        self._parts: dict[K, int] = {}

    def mark(self, key: K) -> None:
        """Note that the row of *key* changed."""
        self.changed.pop(key, None)
        self.changed[key] = None
        self._count(key)

    def _enter(self, key: Any) -> None:
        for place, keys in self.keys_of.items():
            keys.setdefault(key[place], {})[key] = None

    def _leave(self, key: Any) -> None:
        for place, keys in self.keys_of.items():
            del keys[key[place]][key]
            if not keys[key[place]]:
                del keys[key[place]]
        self.mark(key)

    def _count(self, key: K) -> None:
        if (parts := self.form.parts) is not None:
            self.total -= self._parts.pop(key, 0)
            if key in self:
                self._parts[key] = parts(self[key])
                self.total += self._parts[key]

    def __setitem__(self, key: K, row: R) -> None:
        if key not in self:
            self._enter(key)
        elif self.form.in_order:
            super().pop(key)
        super().__setitem__(key, row)
        self.mark(key)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self._leave(key)

    def pop(self, key: K, default: Any = None) -> Any:
        """Remove a row and return it, or *default* when there is none."""
        if key not in self:
            return default
        row = super().pop(key)
        self._leave(key)
        return row

    def keys_with(self, place: int, name: str) -> list[K]:
        """Return the keys that have *name* at *place*, which is one of the form's `names`."""
        return list(self.keys_of[place].get(name, ()))

    def drop_of(self, place: int, name: str) -> None:
        """Remove the rows whose keys have *name* at *place*."""
        for key in self.keys_with(place, name):
            del self[key]

    def drop_oldest(self, kept: int) -> None:
        """Remove the rows set first until there are *kept*."""
        while len(self) > kept:
            del self[next(iter(self))]

    def take_changes(self) -> TableCut:
        """Copy the rows that changed, and begin to mark again."""
        changed, self.changed = self.changed, {}
        return self.cut(changed)

    def cut(self, keys: Iterable[K]) -> TableCut:
        """Copy rows."""
        rows, removed, copied = [], [], self.form.copied
        for key in keys:
            if key in self:
                rows.append((key, copied(self[key])))
            else:
                removed.append(key)
        return TableCut(self.form, rows, removed)

    def load(self, value: Any) -> None:
        """Take the rows of a snapshot; nothing is marked.

        Raises:
            msgspec.ValidationError: They are of another form.
        """
        form = self.form
        rows: list[tuple[K, Any]] = msgspec.convert(
            value, GenericAlias(list, GenericAlias(tuple, (form.key, form.row)))
        )
        super().update((key, form.decoded(row)) for key, row in rows)
        for key in self:
            self._enter(key)
            self._count(key)


class EncodedTable:
    """Encoded rows of one table, kept up to date by cuts. Equal rows give equal bytes.

    A snapshot of a group may have many megabytes: a row is encoded when it has changed.
    """

    __slots__ = ("_form", "_is_sorted", "_joined", "_rows")

    def __init__(self, form: Form[Any, Any]) -> None:
        self._form = form
        self._rows: dict[Any, bytes] = {}
        self._is_sorted = True
        self._joined: bytes | None = None

    def take(self, cut: TableCut) -> None:
        """Go on to the rows of *cut*, which follows the one before without a gap."""
        rows, form = self._rows, self._form
        if cut.rows or cut.removed:
            self._joined = None
        for key in cut.removed:
            rows.pop(key, None)
        for key, row in cut.rows:
            if form.in_order:
                rows.pop(key, None)
            elif key not in rows:
                self._is_sorted = False
            rows[key] = cbor2.dumps((key, form.encoded(row)), canonical=True)

    def joined(self) -> bytes:
        """Return the table as one CBOR array."""
        if self._joined is None:
            if not (self._is_sorted or self._form.in_order):
                # Nearly sorted: a sort from nothing keeps the interpreter from the event loop.
                self._rows = {key: self._rows[key] for key in sorted(self._rows)}
                self._is_sorted = True
            self._joined = head(ARRAY, len(self._rows)) + b"".join(self._rows.values())
        return self._joined


def head(kind: int, count: int) -> bytes:
    """Return the head of an `ARRAY` or a `MAP` in canonical CBOR."""
    if count < 24:
        return bytes([kind | count])
    size = 1 if count < 1 << 8 else 2 if count < 1 << 16 else 4
    return bytes([kind | {1: 24, 2: 25, 4: 26}[size]]) + count.to_bytes(size, "big")
