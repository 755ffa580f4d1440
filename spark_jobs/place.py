"""Where a run is: a folder of this machine, or an address whose small files are fetched.

Plan, summary, result and the record of a push group are small; the tables stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from jepsen_like.checkers.verdict import BadInputError
from jepsen_like.history.parquet import FOLDER, SUMMARY
from jepsen_like.history.sequence import PUSH_RECORD
from jepsen_like.report.run_folder import PLAN_FILE, RESULT_FILE
from spark_jobs.tables import Readable, is_address

SMALL: Final = (PLAN_FILE, RESULT_FILE)
"""Files of a run beside its tables."""
OF_TABLES: Final = (PUSH_RECORD, SUMMARY)
"""Small files in the folder of the tables."""
FILE: Final = "file://"


class Place(NamedTuple):
    """A run.

    Attributes:
        folder: Its folder, or copies of the small files of an address.
        address: Of its tables; empty: they are in the folder.
    """

    folder: Path
    address: str = ""


def path_of(run: Path | str) -> Path | str:
    """Return the path of a run of this machine, `file://` included; the address of another."""
    text = str(run)
    if text.startswith(FILE):
        return Path("/" + text.removeprefix(FILE).partition("/")[2])
    return text if is_address(text) else Path(text)


@contextmanager
def located(run: Path | str, open_tables: Callable[[str], Readable]) -> Iterator[Place]:
    """Yield where a run is; the copies of small files end with the block.

    Args:
        run: A path or an address, of a run or of tables.
        open_tables: Opens the folder at an address.

    Raises:
        BadInputError: There are no whole tables at the address.
    """
    path = path_of(run)
    if isinstance(path, Path):
        yield Place(path)
        return
    address = path.rstrip("/")
    with TemporaryDirectory(prefix="dledger-check-") as made:
        folder = Path(made)
        _copy(open_tables(address), (*SMALL, *OF_TABLES), folder)
        if not (folder / SUMMARY).is_file():
            address = f"{address}/{FOLDER}"
            _copy(open_tables(address), OF_TABLES, folder)
        if not (folder / SUMMARY).is_file():
            raise BadInputError(
                f"{path} holds no {SUMMARY}, here or in {FOLDER}: write the tables there with "
                "dledger history ingest, the summary last"
            )
        yield Place(folder, address)


def _copy(tables: Readable, files: tuple[str, ...], folder: Path) -> None:
    for file in files:
        data = tables.read(file)
        if data is not None:
            (folder / file).write_bytes(data)
