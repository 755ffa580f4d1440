"""The tables of a history where they are, and what makes them no input for a verdict.

A folder is named by a path or by an address: what pyarrow opens (`file`, `s3`, `gs`, `hdfs` with
its native library), and what fsspec opens where that is installed.

A check allocates and frees large arrays all the time. The C library returns each to the system and
asks for it again, and new pages cost more than the work done in them, most of all on a virtual
machine: `keep_memory`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from dledger.jepsen_like.checkers.verdict import BadInputError
from dledger.jepsen_like.history.columns import SCHEMAS, NodeKind, mistake_in
from dledger.jepsen_like.history.parquet import SUMMARY, Ingested, footer_of
from dledger.jepsen_like.history.sums import as_text, sum_of_table

AGAIN: Final = "make the tables again with dledger history ingest"
CHECKED: Final = ("f", "outcome", "level", "decision", "cnt", "queue", "off", "call_ns", "ret_ns")
"""Columns of `ops` that every row is checked by."""
SCAN: Final = ds.ParquetFragmentScanOptions(
    # A row group that is fetched whole takes new memory for each.
    pre_buffer=False,
    page_checksum_verification=True,
)


class UnknownAddressError(BadInputError):
    """No library of this process opens the address."""


def is_address(place: str) -> bool:
    """Whether *place* is an address and not a path."""
    return "://" in place


def open_place(place: str) -> tuple[Any, str]:
    """Return the file system of a path or an address, and the path in it.

    Raises UnknownAddressError: no library opens such an address, or the service does not answer.
    """
    if not is_address(place):
        return pafs.LocalFileSystem(), str(Path(place).resolve())
    try:
        found: tuple[Any, str] = pafs.FileSystem.from_uri(place.replace("s3a://", "s3://", 1))
    except (OSError, pa.ArrowException):
        found = _by_fsspec(place)
    return found


def _by_fsspec(place: str) -> tuple[Any, str]:
    scheme = place.partition("://")[0]
    try:
        filesystem, path = import_module("fsspec.core").url_to_fs(place)  # if it is installed
    except (ImportError, ValueError, OSError) as error:
        raise UnknownAddressError(
            f"{place} cannot be opened: install what opens {scheme}:// with fsspec, or copy the "
            "tables to this machine"
        ) from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


class Tables:
    """The tables in one folder.

    Args:
        place: The folder: a path or an address.

    Raises:
        UnknownAddressError: No library opens the address.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = str(place).rstrip("/")
        self.filesystem, self._root = open_place(self.place)

    def name(self, table: str) -> str:
        """Return the path or address of a table, as sentences name it."""
        return f"{self.place}/{table}.parquet"

    def read(self, file: str) -> bytes | None:
        """Return the bytes of a small file; None: it is not there.

        Raises OSError: it cannot be read.
        """
        path = f"{self._root}/{file}"
        if self.filesystem.get_file_info(path).type != pafs.FileType.File:
            return None
        with self.filesystem.open_input_stream(path) as stream:
            data: bytes = stream.read()
        return data

    def dataset(self, table: str) -> Any:
        """Return a table as a dataset with the schema of this version.

        Raises BadInputError: it is missing, or is no Parquet.
        """
        path = f"{self._root}/{table}.parquet"
        with named(self.name(table)):
            if self.filesystem.get_file_info(path).type == pafs.FileType.NotFound:
                raise BadInputError(f"{self.name(table)} is missing: {AGAIN}")
            return ds.dataset(
                path,
                schema=SCHEMAS[table],
                filesystem=self.filesystem,
                format=ds.ParquetFileFormat(default_fragment_scan_options=SCAN),
            )

    def footer(self, table: str) -> tuple[int, int] | None:
        """Return size and checksum of a table that is one file; None: it is not.

        Raises BadInputError: it cannot be read.
        """
        path = f"{self._root}/{table}.parquet"
        with named(self.name(table)):
            if self.filesystem.get_file_info(path).type != pafs.FileType.File:
                return None
            with self.filesystem.open_input_file(path) as file:
                return footer_of(file)

    def footers(self, table: str) -> Iterator[tuple[Any, int]]:
        """Yield columns and number of rows of each file of a table.

        Raises BadInputError: the table is missing, or is no Parquet.
        """
        for fragment in self.dataset(table).get_fragments():
            with named(self.name(table)):
                yield fragment.physical_schema, fragment.metadata.num_rows

    def nodes(self) -> Any:
        """Return the table `nodes`.

        Raises BadInputError: it cannot be read, has nulls, or rows of a kind not known here.
        """
        name = self.name("nodes")
        with named(name):
            table = self.dataset("nodes").to_table()
        return checked_nodes(name, table)

    def events(self) -> Any:
        """Return the table `events`. Raises BadInputError: it cannot be read, or has nulls."""
        name = self.name("events")
        with named(name):
            table = self.dataset("events").to_table()
        check_batch(name, table)
        return table


def check_tables(tables: Tables, counts: Ingested) -> None:
    """See that all tables are there with their columns and as many rows as *counts* has.

    The small ones are summed here; an engine sums `ops` and `obs` as it reads them.

    Raises BadInputError: they are not.
    """
    expected = {
        "ops": counts.ops,
        "obs": counts.obs,
        "events": counts.events,
        "nodes": counts.reads + counts.states + counts.samples + counts.floors,
    }
    for table, count in expected.items():
        name, rows = tables.name(table), 0
        written, found = counts.footers.get(table), tables.footer(table)
        # A file of another size was written again by something else; its rows are counted.
        if written and found and written[0] == found[0] and written[1] != found[1]:
            raise BadInputError(f"{name} has a damaged footer: {AGAIN}, or copy it again")
        for schema, some in tables.footers(table):
            check_schema(name, schema, SCHEMAS[table])
            rows += some
        if rows != count:
            raise BadInputError(f"{name} holds {rows} rows, and {SUMMARY} counts {count}: {AGAIN}")
    for table, rows in (("nodes", tables.nodes()), ("events", tables.events())):
        check_sum(tables.name(table), sum_of_table(table, rows), counts.sums.get(table))


def check_sum(name: str, found: int, expected: str | None) -> None:
    """See that a table has the rows that it was written with.

    Args:
        expected: As its summary has it; None: it has none.

    Raises:
        BadInputError: They are others.
    """
    if expected is not None and as_text(found) != expected:
        raise BadInputError(
            f"{name} holds other rows than it was written with, by their sum in {SUMMARY}: "
            f"{AGAIN}, or copy it again"
        )


def checked_nodes(name: str, table: Any) -> Any:
    """Return *table*, which has no nulls and no rows of a kind not known here.

    Raises BadInputError: it has.
    """
    check_batch(name, table)
    kinds = table.column("kind").to_numpy()
    if len(kinds) and not 0 <= kinds.min() <= kinds.max() < len(NodeKind):
        raise BadInputError(
            f"{name} holds a row whose kind is {kinds.max()}, which this version does not know: "
            "check with the version that wrote it"
        )
    return table


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give an error of reading a table one sentence with the name of the table.

    Raises BadInputError: in place of the errors of the file system and of pyarrow.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        said = " ".join(str(error).split())[:200]
        raise BadInputError(f"{name} cannot be read ({said}): {AGAIN}, or copy it again") from error


def batches(name: str, found: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a table; each has passed `check_batch`.

    Raises BadInputError: one cannot be read, or has not.
    """
    every = iter(found)
    while True:
        with named(name):
            batch = next(every, None)
        if batch is None:
            return
        check_batch(name, batch)
        yield batch


def check_batch(name: str, batch: Any) -> None:
    """See that no column has nulls, and that each word is one; the reader sees to numbers alone.

    Raises BadInputError: one has, or is damaged.
    """
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if column.null_count:
            raise BadInputError(f"{name} has nulls in the column {field.name}: {AGAIN}")
        if not pa.types.is_integer(field.type):
            with named(f"{name}, column {field.name},"):
                column.validate(full=True)


def check_rows(name: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """See that rows of `ops` are of known kinds and do not return before their call.

    Raises BadInputError: they are not.
    """
    wrong = mistake_in(columns)
    if wrong:
        raise BadInputError(f"{name} {wrong}: {AGAIN}, with the version that wrote the history")


def check_schema(name: str, found: Any, schema: Any) -> None:
    """See that a file has the columns of *schema* with their types; it may have more.

    Raises BadInputError: it has not.
    """
    for field in schema:
        at = found.get_field_index(field.name)
        if at < 0:
            raise BadInputError(f"{name} has no column {field.name}: {AGAIN}")
        kind = found.field(at).type
        if _plain(kind) != _plain(field.type):
            raise BadInputError(
                f"{name} has {kind} in the column {field.name}, not {field.type}: {AGAIN}"
            )


def _plain(kind: Any) -> Any:
    """Return the type of the values; words may be kept in a dictionary or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_large_string(kind) else kind


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = (1 << 31) - 1
"""Free memory kept at most, and the largest array taken from it: all that the call can say."""


def keep_memory() -> bool:
    """Let this process keep what it frees; return whether its C library can be set so (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
