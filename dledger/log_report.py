"""What stands in the log of a stopped broker, for ``dledger log``.

Nothing in the folder is changed. `verify` follows the log to its end, with every record in it; what
is made from it, and the small files beside it, are audited as those of several replicas are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from dledger.commitlog.entry import record_sizes
from dledger.commitlog.errors import CorruptRecordError, CorruptStoreError, StoreError
from dledger.commitlog.record import decode_record
from dledger.output import (
    CliError,
)
from dledger.raft.journal import parse_term_vote
from dledger.raft.wire import TERM_MAX
from dledger.remoting.addresses import join_address
from dledger.spark_jobs.audit.compare import audit, sentence
from dledger.spark_jobs.audit.folder import (
    Before,
    ReplicaFolder,
    Whole,
    after_blank,
    first_written,
    follow,
    newest_slot,
    open_folder,
)

KINDS = {0: "no-op", 1: "records", 2: "config"}


class LogDamageError(StoreError):
    """The log cannot be followed to its end."""


def stopped_folder(root: Path) -> ReplicaFolder:
    """Return the data folder *root* of a stopped broker.

    Raises:
        NotAFolderError: It is not a data folder.
        CliError: A broker runs on it.
        StoreError: It is another program's or a newer version's, or its begin is not known.
    """
    folder = open_folder(root)
    if folder.running:
        raise CliError(f"{root} is in use by a running broker", next_step="stop it first")
    return folder


def entries_of(
    folder: ReplicaFolder, read_to: Callable[[int], object] = lambda _: None
) -> Iterator[Whole]:
    """Yield all entries of a log, each checked whole; call *read_to* with the end of each.

    Raises LogDamageError: there is more in the log than they.
    """
    anchor = folder.anchor
    begin = Before(
        anchor.first_index - 1, anchor.prev_term, anchor.prev_chain, anchor.prev_store_time_ms
    )
    end = anchor.position
    for entry in follow(folder, begin.index, end, begin):
        end = entry.header.end_position
        read_to(end)
        yield entry
    rest = first_written(folder, after_blank(folder, end))
    if rest >= 0:
        raise LogDamageError(f"byte {rest} behind the last whole entry is not zero")


PROBLEMS_SHOWN: Final = 20
"""One torn place can break thousands of units; the first ones state where to look."""


class StoreReport(msgspec.Struct, kw_only=True):
    """What stands in a data folder, and what is wrong with it."""

    folder: str
    clean_stop: bool
    commit_index: int
    entries: int = 0
    records: int = 0
    first_index: int = 0
    last_index: int = 0
    last_term: int = 0
    chain: str = ""
    end_position: int = 0
    units: int = 0
    keys: int = 0
    problem_count: int = 0
    problems: list[str] = []
    notes: list[str] = []


def verify_store(root: Path, looked_at: Callable[[int], object] = lambda _: None) -> StoreReport:
    """Return what stands in the data folder of a stopped broker. Raises: as `stopped_folder`."""
    folder = stopped_folder(root)
    mark = folder.mark
    report = StoreReport(
        folder=str(root),
        clean_stop=folder.clean_stop,
        commit_index=0 if mark is None else mark.index,
    )
    problems = [*folder.problems, *_in_vote(folder), *_in_log(folder, report)]
    audited = audit([root], on_done=looked_at)
    report.units, report.keys = audited.units, audited.keys
    report.notes = [note.text for note in audited.notes] if mark else [audited.reason]
    report.problem_count = len(problems) + audited.finding_count
    problems += [sentence(finding) for finding in audited.findings]
    report.problems = problems[:PROBLEMS_SHOWN]
    return report


def _in_vote(folder: ReplicaFolder) -> Iterator[str]:
    try:
        payload = newest_slot(Path(folder.paths.vote), folder.notes)
        if payload is not None:
            parse_term_vote(payload)
    except CorruptStoreError as error:
        yield f"vote: {error}"


def _in_log(folder: ReplicaFolder, report: StoreReport) -> Iterator[str]:
    """Count what stands in the log up to its end, and yield what is wrong in it."""
    anchor = folder.anchor
    report.last_index, report.end_position = anchor.first_index - 1, anchor.position
    try:
        for entry in entries_of(folder):
            header = entry.header
            report.first_index = report.first_index or header.index
            report.entries += 1
            report.records += header.record_count
            report.last_index, report.last_term = header.index, header.term
            report.chain, report.end_position = f"{header.chain:016x}", header.end_position
            if not 0 <= header.term <= TERM_MAX:
                yield f"log: entry {header.index} is of a term that no group comes to"
            yield from _in_records(entry)
    except LogDamageError as error:
        yield f"log: {error}"


def _in_records(entry: Whole) -> Iterator[str]:
    header, start = entry.header, entry.header.body_start
    for size in record_sizes(entry.frame, header).tolist():
        position = header.position + start
        try:
            record = decode_record(entry.frame, start)
        except CorruptRecordError as error:
            yield f"record at byte {position}: {error}"
        else:
            has = (record.phy_offset, record.size, record.store_timestamp_ms)
            wanted = (position, size, header.store_time_ms)
            if has != wanted:
                yield f"record at byte {position} has place, size and time {has}, not {wanted}"
        start += size


def entry_row(entry: Whole) -> dict[str, Any]:
    """Return what is shown of an entry. Pure."""
    header = entry.header
    topics: dict[str, int] = {}
    first = ""
    start = header.body_start
    for size in record_sizes(entry.frame, header).tolist():
        record = decode_record(entry.frame, start)
        if not first:
            first = f"{record.topic} queue {record.queue_id} offset {record.queue_offset}"
        topics[record.topic] = topics.get(record.topic, 0) + 1
        start += size
    return {
        "index": header.index,
        "term": header.term,
        "time": _time(header.store_time_ms),
        "kind": KINDS.get(header.kind, str(header.kind)),
        "records": header.record_count,
        "bytes": header.size,
        "first": first,
        "position": header.position,
        "chain": f"{header.chain:016x}",
        "topics": topics,
    }


def terms_of(entries: Iterable[Whole]) -> list[dict[str, Any]]:
    """Return one row for each term, in order. Pure."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        header = entry.header
        if not rows or rows[-1]["term"] != header.term:
            rows.append(
                {
                    "term": header.term,
                    "began": _time(header.store_time_ms),
                    "first_index": header.index,
                    "entries": 0,
                    "records": 0,
                    "leader": None,
                }
            )
        row = rows[-1]
        row["entries"] += 1
        row["records"] += header.record_count
        if row["leader"] is None and header.record_count:
            row["leader"] = join_address(*decode_record(entry.frame, header.body_start).store_host)
    return rows


def _time(at_ms: int) -> str | None:
    """Return a store time as text; None: entries before the first message have none."""
    if not at_ms:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")[:23]
