"""The tables of a replica as plain values, read from the fields of the tables themselves.

A snapshot is what the product chooses to keep; a field that it forgets is missing on both sides of
a comparison of snapshots. So this walk asks each object for its own fields: those of a dataclass
that count in comparisons, those of a `msgspec.Struct`, and all slots of any other class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from dledger.state.tables import StateTables

WORKING_SLOTS: Final = frozenset({("ProducerSessions", "_touched")})
"""Slots that hold what a replica has still to copy, and no state."""

KEEPS_ORDER: Final = frozenset({("ProducerSessions", "_sessions"), ("PendingTimers", "_recalled")})
"""Mappings whose oldest item goes first: their order is state."""

FROM_SETTINGS: Final = frozenset({"builtin_topics", "builtin_groups"})
"""Fields that no entry changes."""

_LEAVES: Final = (int, str, bytes, float, type(None))


def digests_by_field(tables: StateTables) -> dict[str, bytes]:
    """Return a digest of each field of *tables*; equal tables have equal digests.

    Raises:
        TypeError: A field holds something that this walk does not know.
    """
    return {
        field.name: blake2b(repr(plain(getattr(tables, field.name))).encode()).digest()[:16]
        for field in fields(tables)
        if field.compare and field.name not in FROM_SETTINGS
    }


def plain(value: Any) -> Any:
    """Return *value* as tuples of leaves whose `repr` is equal where the values are equal.

    Raises:
        TypeError: It holds something that this walk does not know.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, OrderedDict):
        return tuple((plain(key), plain(item)) for key, item in value.items())
    if isinstance(value, Mapping):
        return tuple(sorted(((plain(key), plain(item)) for key, item in value.items()), key=repr))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((plain(item) for item in value), key=repr))
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    return (type(value).__name__, tuple(_fields_of(value)))


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    kind = type(value).__name__
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.compare]
    elif isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    else:
        names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        if not names or hasattr(value, "__dict__"):
            raise TypeError(f"no rule for the fields of a {kind}")
    found: list[tuple[str, Any]] = []
    for name in names:
        item = getattr(value, name)
        if (kind, name) in KEEPS_ORDER:
            found.append((name, plain(list(item.items()))))
        elif (kind, name) not in WORKING_SLOTS:
            found.append((name, plain(item)))
    return found
