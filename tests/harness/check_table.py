"""What every replicated table and every change of one keeps to."""

from collections.abc import Mapping
from typing import Any

import cbor2
import msgspec
import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.jepsen_like.simulation.reference_replica import plain
from dledger.state.state_record import decode_change, encode_change
from dledger.state.table import EncodedTable, Form, StateChange, Table


def encoded(table: Mapping[Any, Any]) -> bytes:
    """Return a table as a snapshot has it."""
    assert isinstance(table, Table)
    image = EncodedTable(table.form)
    image.take(table.cut(table))
    return image.joined()


def loaded(form: Form[Any, Any], data: bytes) -> Table[Any, Any]:
    """Return the table in a part of a snapshot."""
    table = form.table()
    table.load(cbor2.loads(data))
    return table


def check_index(table: Table[Any, Any]) -> None:
    """Check that a table finds and counts the rows it has."""
    for place, keys in table.keys_of.items():
        names = {key[place] for key in table}
        rows = {name: {key for key in table if key[place] == name} for name in names}
        assert {name: {*found} for name, found in keys.items()} == rows
    assert table.total == sum(map(table.form.parts or (lambda _: 0), table.values()))


def check_table(form: Form[Any, Any], rows: Mapping[Any, Any]) -> None:
    """Check a table: snapshots, cuts, digests, and that a row of another form is refused.

    Args:
        rows: Two rows at least, the largest key first, with no value that is a default.
    """
    assert list(rows) == sorted(rows, reverse=True)
    assert len(rows) > 1
    table, followed = form.table(), EncodedTable(form)
    followed.take(table.cut(table))
    for key, row in rows.items():
        table[key] = row
        assert list(table.changed) == [key]
        followed.take(table.take_changes())
        assert followed.joined() == encoded(table)
        assert not table.changed
        check_index(table)

    again = loaded(form, encoded(table))
    assert again == table
    check_index(again)
    assert list(again) == list(rows) if form.in_order else sorted(rows)
    assert encoded(again) == encoded(table), "equal tables give equal bytes"
    assert not again.changed
    assert plain(again) == plain(table)

    first, last = max(rows), min(rows)
    table[first] = rows[first]
    assert (list(table)[-1] == first) == form.in_order, "where the order is state, it is the last"
    assert (encoded(again) != encoded(table)) == form.in_order
    assert (plain(again) != plain(table)) == form.in_order
    late = table.take_changes()
    del table[last]
    assert plain(again) != plain(table)
    assert table.pop(last) is None
    check_index(table)
    followed.take(late)
    followed.take(table.take_changes())
    assert followed.joined() == encoded(table)

    values = cbor2.loads(encoded(again))
    wrong = [[*values[0], 0], values[0][:1], [values[0][1], values[0][0], 0], [None, values[0][1]]]
    row = values[0][1]
    if isinstance(row, dict) and all(isinstance(name, str) for name in row):
        wrong.append([values[0][0], {**row, "odd": 1}])
    elif isinstance(row, list):
        wrong.append([values[0][0], [*row, 1]])
    for value in wrong:
        with pytest.raises(msgspec.ValidationError):
            form.table().load([value])


def check_change(change: StateChange) -> None:
    """Check a state record: it is read as it was written, and one of another form stops the node.

    Args:
        change: With no field that is empty.
    """
    queue_id, body = encode_change(change)
    assert decode_change(queue_id, body) == change
    version, *values = cbor2.loads(body)
    assert all(value is not None for value in values)
    wrong: list[Any] = [[version, *values, 0], {"v": version}]
    for at, value in enumerate(values):
        wrong.append([version, *values[:at], 1.5, *values[at + 1 :]])
        if isinstance(value, list) and value and isinstance(value[0], dict):
            odd = [{**value[0], "odd": 1}, *value[1:]]
            wrong.append([version, *values[:at], odd, *values[at + 1 :]])
        elif isinstance(value, list) and value and isinstance(value[0], list):
            odd = [[*value[0], 0, 0], *value[1:]]
            wrong.append([version, *values[:at], odd, *values[at + 1 :]])
    for each in wrong:
        with pytest.raises(InvariantBroken, match="state record"):
            decode_change(queue_id, cbor2.dumps(each))
    with pytest.raises(InvariantBroken, match="version 2"):
        decode_change(queue_id, cbor2.dumps([2, *values]))
