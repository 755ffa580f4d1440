"""Histories in memory as columns: the same as Arrow's, and nothing that Arrow's do not hold."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.kernel.tables import Batch, MemorySource
from dledger.jepsen_like.history.columns import (
    OBS,
    OPS,
    chosen,
    events_of,
    events_table,
    floors_of,
    has_word,
    nodes_table,
    obs_table,
    operations_of,
    ops_table,
)
from dledger.jepsen_like.history.operation import History, Operation, Outcome
from dledger.jepsen_like.history.small_tables import SmallTable
from tests.harness.clean_histories import clean_history

SEEDS = range(0, 60, 7)


def pairs(history: History) -> list[tuple[Any, SmallTable]]:
    """Return both tables as Arrow has them, and as they are in memory."""
    operations, reads = history.operations, history.replica_reads
    return [
        (ops_table("r", operations), SmallTable.of_operations(operations)),
        (obs_table("r", operations, reads), SmallTable.of_looks(operations, reads)),
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_in_memory_are_those_of_arrow(seed: int) -> None:
    for arrow, small in pairs(clean_history(seed)):
        assert small.num_rows == arrow.num_rows > 20
        rows = np.arange(small.num_rows - 1, 0, -3)
        for name in arrow.column_names[1:]:
            assert small.column(name).to_pylist() == arrow.column(name).to_pylist()
            taken = chosen(small, rows).column(name)
            assert taken.to_pylist() == chosen(arrow, rows).column(name).to_pylist()
        flags = small.column("off").to_numpy() % 2 == 0
        odd = [{k: v for k, v in row.items() if k != "run_id"} for row in arrow.to_pylist()]
        kept = [row for row, is_kept in zip(odd, flags.tolist(), strict=True) if is_kept]
        assert chosen(small, flags).to_pylist() == [
            {name: row[name] for name in small.to_pylist()[0]} for row in kept
        ]
        topic = small.column("topic").to_pylist()[0]
        assert np.array_equal(
            has_word(small.column("topic"), (topic, "?")),
            has_word(arrow.column("topic"), (topic, "?")),
        )


def test_rows_in_memory_are_the_operations() -> None:
    history = clean_history(3)
    small = SmallTable.of_operations(history.operations)
    found = SmallTable.of_looks(history.operations, history.replica_reads)
    whole = operations_of(small, found)
    arrow = operations_of(
        ops_table("r", history.operations), obs_table("r", history.operations, ())
    )
    assert whole == arrow
    bare = operations_of(small, found.take(np.zeros(0, dtype=np.int64)))
    assert bare == [msgspec.structs.replace(op, values=()) for op in arrow]
    assert any(op.values for op in history.operations), "they stay as they are"


class ArrowSource(MemorySource):
    """A history in memory as tables of Arrow's: what a `LocalSource` reads from files."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        run_id, operations = history.header.run_id, history.operations
        self._nodes = nodes_table(
            run_id, history.replica_states, history.replica_reads, floors=history.floors
        )
        self._events = events_table(run_id, history.events)
        self._tables = {
            "ops": ops_table(run_id, operations),
            "obs": obs_table(run_id, operations, history.replica_reads),
        }
        batches = {name: table.to_batches() for name, table in self._tables.items()}
        self._by_ops = Batch(batches["ops"][0], {}, OPS)
        self._by_obs = Batch(batches["obs"][0], {}, OBS)

    def ops(self, want: Any, rows_max: int) -> Any:
        return chosen(self._tables["ops"], self._by_ops.meets(want))

    def obs(self, want: Any, rows_max: int) -> Any:
        return chosen(self._tables["obs"], self._by_obs.meets(want))


def test_events_and_floors_of_a_list_are_those_of_a_table() -> None:
    history = clean_history(5)
    in_memory, in_tables = MemorySource(history), ArrowSource(history)
    assert events_of(in_memory.events()) == events_of(in_tables.events()) == history.events
    assert floors_of(in_memory.nodes()) == floors_of(in_tables.nodes()) == history.floors


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"off": 1 << 63}, "OverflowError"),
        ({"queue": 1 << 31}, "too large to fit"),
        ({"f": 200}, "too large to fit"),
        ({"status": 1 << 15}, "too large to fit"),
        ({"value": 1.5}, "numbers of 64 bits and words"),
        ({"topic": None}, "numbers of 64 bits and words"),
        ({"group": "\ud800"}, "Unicode"),
        ({"values": (1, 1 << 63)}, "OverflowError"),
    ],
)
def test_number_that_no_column_holds_is_unknown(field: dict[str, Any], said: str) -> None:
    row = Operation(0, 0, 1, 0, 1, Outcome.OK, 1, 2, "T", 0, 0, 2, values=(7, 8))
    history = clean_history(1)
    history.operations = [row, msgspec.structs.replace(row, **{"op_id": 1, **field})]
    (verdict,) = check_everything(history)
    assert (verdict.checker, verdict.validity) == ("rows", "unknown")
    assert said in verdict.reason
