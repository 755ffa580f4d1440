"""Which pieces of work an audit has, and doing one of them, in any process and order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from commitlog.errors import NewerEntryError
from commitlog.segment import segment_base
from spark_jobs.audit.folder import ReplicaFolder
from spark_jobs.audit.key_entries import check_file, key_files, open_key_file, shape_of
from spark_jobs.audit.log_range import SegmentAudit
from spark_jobs.audit.segment_report import Finding, SegmentReport


class Work(msgspec.Struct, frozen=True, order=True):
    """One piece of work: a segment of all replicas, or an index file of one.

    Attributes:
        base: Where the segment begins; -1: it is an index file.
        replica: Whose index file it is.
    """

    base: int = -1
    replica: int = -1
    file: str = ""


class Done(msgspec.Struct):
    """The result of a piece of work."""

    segment: SegmentReport | None = None
    findings: list[Finding] = []
    problem: str = ""


def commit_position(folders: Sequence[ReplicaFolder]) -> int:
    """Return the end of the newest entry that any replica knows to be committed."""
    return max(folder.due for folder in folders)


def why_not(folders: Sequence[ReplicaFolder]) -> str:
    """Return why these folders cannot be compared; empty when they can."""
    if len(folders) < 2:
        return "one folder alone has nothing to be compared with"
    if len({folder.log_format.segment_bytes for folder in folders}) > 1:
        return "the folders have segments of different sizes"
    if not commit_position(folders):
        return "no folder has a commit mark: nothing is known to be committed"
    return ""


def plan(folders: Sequence[ReplicaFolder]) -> list[Work]:
    """Return the pieces of work, in the order of the log."""
    size = folders[0].log_format.segment_bytes
    begin = min(segment_base(folder.anchor.position, size) for folder in folders)
    works = [Work(base=base) for base in range(begin, commit_position(folders), size)]
    for number, folder in enumerate(folders):
        works += [
            Work(replica=number, file=folder.relative(path))
            for path in key_files(folder)
            if shape_of(path.stat().st_size) is not None
        ]
    return works


def do(folders: Sequence[ReplicaFolder], work: Work) -> Done:
    """Do one piece of work; nothing else has to be done before."""
    try:
        if work.base >= 0:
            return Done(SegmentAudit(folders, work.base, commit_position(folders)).run())
        folder = folders[work.replica]
        path = folder.root / work.file
        file = open_key_file(folder, path)
        if file is None:
            return Done()
        promised = path != key_files(folder)[-1] or folder.derived_promised
        return Done(findings=list(check_file(file, slots_promised=promised)))
    except NewerEntryError as error:
        return Done(problem=f"{error}: audit with the newer version")
    finally:
        for folder in folders:
            folder.forget()
