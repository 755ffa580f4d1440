"""An audit of data folders: plan pieces of work, do them, join their findings into one verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.commitlog.entry import parse_header, verify_frame
from dledger.commitlog.errors import CorruptEntryError, NewerEntryError
from dledger.commitlog.segment import segment_base
from dledger.spark_jobs.audit.folder import (
    ReplicaFolder,
    after_blank,
    first_written,
    follow,
    open_folder,
)
from dledger.spark_jobs.audit.segment_report import (
    ANCHOR,
    BLANK,
    DERIVED,
    ENTRY,
    FINDINGS_MAX,
    FORK,
    LOST,
    MARK,
    OFFSETS,
    QUEUE_UNIT,
    Audited,
    Edge,
    Finding,
    Note,
    QueueMismatch,
    Report,
    SegmentReport,
    Suspect,
    Verdict,
)
from dledger.spark_jobs.audit.work import Done, Work, do, plan, why_not

_KINDS: Final = {"damaged": ENTRY, "fork": FORK, "blank": BLANK, "zeros": LOST}
_WHAT: Final = {
    "damaged": "entry {index} does not fit its checksums",
    "fork": "another whole entry {index} than the other replicas hold",
    "blank": "the blank behind entry {index} is not what it must be",
    "zeros": "nothing stands where entry {index} must be",
}


def join(folders: Sequence[ReplicaFolder], dones: Iterable[tuple[Work, Done]]) -> Report:
    """Return what all pieces of work say together; they may come in any order."""
    return _Join(folders, sorted(dones, key=lambda pair: pair[0])).report()


class _Join:
    def __init__(
        self, folders: Sequence[ReplicaFolder], dones: Sequence[tuple[Work, Done]]
    ) -> None:
        self._folders = folders
        self._named = {folder.name: folder for folder in folders}
        self._segments = [done.segment for _, done in dones if done.segment is not None]
        self._found = [finding for _, done in dones for finding in done.findings]
        self._found += [finding for one in self._segments for finding in one.findings]
        self._problems = [done.problem for _, done in dones if done.problem]
        self._notes: set[Note] = set()
        self._commit = max(
            (folder.mark for folder in folders if folder.mark is not None),
            key=lambda mark: mark.index,
        )
        self._ended: set[str] = set()
        self._equal_ends: dict[str, tuple[int, int]] = {}
        for one in self._segments:
            self._equal_ends |= one.equal_ends

    def report(self) -> Report:
        self._join_segments()
        self._judge_suspects()
        self._judge_queues()
        tails = [self._tail(folder) for folder in self._folders]
        self._note_folders()
        findings = sorted(self._found)
        verdict, reason = self._verdict(findings)
        segments = self._segments
        left = sum(one.suspects_left + one.mismatches_left for one in segments)
        return Report(
            verdict=verdict,
            reason=reason,
            commit_index=self._commit.index,
            commit_position=self._commit.end_position,
            entries=sum(one.entries for one in segments),
            records=sum(one.records for one in segments),
            units=sum(one.units for one in segments),
            keys=sum(one.keys for one in segments),
            finding_count=len(findings) + left,
            findings=findings[:FINDINGS_MAX],
            notes=sorted(self._notes),
            replicas=[
                Audited(
                    replica=folder.name,
                    running=folder.running,
                    clean_stop=folder.clean_stop,
                    first_index=folder.anchor.first_index,
                    last_index=tail.last_index,
                    commit_index=folder.mark.index if folder.mark else 0,
                    end_position=tail.end_position,
                )
                for folder, tail in zip(self._folders, tails, strict=True)
            ],
        )

    def _verdict(self, findings: Sequence[Finding]) -> tuple[Verdict, str]:
        moving = [f for f in findings if f.kind in DERIVED and self._named[f.replica].running]
        certain = [f for f in findings if f not in moving]
        if certain:
            return "parted", sentence(certain[0])
        if self._problems:
            return "unknown", self._problems[0]
        if moving:
            return "unknown", f"a broker went on while its files were read: {sentence(moving[0])}"
        entries = sum(one.entries for one in self._segments)
        if sum(one.alone for one in self._segments) == entries:
            return "unknown", "no two folders hold the same part of the log"
        return "equal", ""

    def _note(self, replica: str, text: str) -> None:
        self._notes.add(Note(replica, text))

    # -- segments among each other ---------------------------------------------------------

    def _join_segments(self) -> None:
        """Compare the last entry of each segment with the first one of the next."""
        before: SegmentReport | None = None
        for one in self._segments:
            if before is not None and before.last is not None:
                if one.first is not None and all(s.certain for s in before.suspects):
                    self._join_entries(before.last, one.first)
                self._check_begins(before.last, one.base)
            before = one
        last = None if before is None else before.last
        ends_there = last is not None and last.index == self._commit.index
        if not ends_there and not any(one.suspects for one in self._segments):
            self._mark_is_wrong()

    def _join_entries(self, last: Edge, first: Edge) -> None:
        if self._continues(last, first):
            return
        self._found.append(
            Finding(
                replica="",
                kind=FORK,
                index=first.index,
                position=first.position,
                detail=f"does not follow entry {last.index}, and nothing shows which one is wrong",
            )
        )

    def _continues(self, last: Edge, first: Edge) -> bool:
        if (
            first.index != last.index + 1
            or first.term < last.term
            or first.store_time_ms < last.store_time_ms
        ):
            return False
        folder = self._named[first.holder]
        base = segment_base(first.position, folder.log_format.segment_bytes)
        at = first.position - base
        view = folder.segment(base)
        try:
            header = parse_header(view, at)
            verify_frame(view[at : at + header.size], header, last.chain)
        except CorruptEntryError:
            return False
        return True

    def _check_begins(self, last: Edge, base: int) -> None:
        for folder in self._folders:
            anchor = folder.anchor
            if anchor.position != base:
                continue
            given = (anchor.first_index - 1, anchor.prev_term, anchor.prev_chain)
            if given != (last.index, last.term, last.chain):
                self._found.append(
                    Finding(
                        replica=folder.name,
                        kind=ANCHOR,
                        file="raft/anchor",
                        index=last.index,
                        position=base,
                        detail="names another entry before the first one than the log has",
                    )
                )

    def _mark_is_wrong(self) -> None:
        for folder in self._folders:
            if folder.mark == self._commit:
                self._found.append(
                    Finding(
                        replica=folder.name,
                        kind=MARK,
                        file="raft/commit_mark",
                        index=self._commit.index,
                        detail=f"no entry {self._commit.index} ends at its place in the log",
                    )
                )

    # -- bytes that are not those of the log -----------------------------------------------

    def _judge_suspects(self) -> None:
        for one in self._segments:
            for suspect in one.suspects:
                self._judge(suspect)

    def _judge(self, suspect: Suspect) -> None:
        folder = self._named[suspect.replica]
        equal_end, _ = self._equal_ends.get(suspect.replica, (-1, 0))
        what = _WHAT[suspect.kind].format(index=suspect.index)
        if not suspect.certain:
            self._find(suspect, f"{what}; no replica holds it whole")
        elif suspect.tied:
            self._find(suspect, f"{suspect.replica}: {what}, and nothing shows which is right")
        elif suspect.position < folder.due:
            self._find(suspect, what)
        elif equal_end > suspect.position:
            self._find(suspect, f"{what}; above its own commit mark, but the log goes on behind it")
        elif suspect.kind != "fork" and folder.ends_early(suspect.position):
            self._find(suspect, f"{what}; the log was closed with more in it")
        elif suspect.replica in self._ended:
            return
        else:
            self._ended.add(suspect.replica)
            self._note_end(suspect)

    def _note_end(self, suspect: Suspect) -> None:
        """Say how a log that has to hold no more than this ends, once for each."""
        if suspect.kind == "zeros":
            self._note(
                suspect.replica,
                f"ends before entry {suspect.index}; entry {self._commit.index} is committed",
            )
        elif suspect.kind == "fork":
            self._note(
                suspect.replica,
                f"holds entries from {suspect.index} on that were never committed: a leader will "
                "cut them",
            )
        else:
            self._note(suspect.replica, f"a torn tail at byte {suspect.position}, above its mark")

    def _find(self, suspect: Suspect, detail: str) -> None:
        folder = self._named[suspect.replica]
        base = segment_base(suspect.position, folder.log_format.segment_bytes)
        self._found.append(
            Finding(
                replica="" if suspect.tied else suspect.replica,
                kind=_KINDS[suspect.kind],
                file=folder.relative(folder.segment_path(base)),
                byte=suspect.byte - base,
                index=suspect.index,
                position=suspect.byte,
                count=suspect.count,
                detail=detail,
            )
        )

    # -- queues ----------------------------------------------------------------------------

    def _judge_queues(self) -> None:
        deleted: dict[str, list[int]] = defaultdict(list)
        for one in self._segments:
            for topic, position in one.deleted:
                deleted[topic].append(position)
        unwritten: Counter[str] = Counter()
        for one in self._segments:
            for mismatch in one.mismatches:
                if any(position > mismatch.position for position in deleted[mismatch.topic]):
                    continue
                if mismatch.missing and not self._named[mismatch.replica].derived_promised:
                    unwritten[mismatch.replica] += mismatch.count
                else:
                    self._found.append(_of_queue(mismatch))
        for replica, count in unwritten.items():
            self._note(replica, f"{count} queue units are not written yet")
        self._check_offsets(deleted)

    def _check_offsets(self, deleted: dict[str, list[int]]) -> None:
        """Offsets of a queue follow one another, unless its topic was deleted between them."""
        ends: dict[tuple[str, int], tuple[int, int]] = {}
        holes = [s.position for one in self._segments for s in one.suspects if not s.certain]
        for one in self._segments:
            for run in one.runs:
                key = (run.topic, run.queue_id)
                end, position = ends.get(key, (run.first, run.position))
                cut = any(position < at < run.position for at in deleted[run.topic])
                cut = cut and run.first == 0
                unknown = any(position < at < run.position for at in holes)
                if run.first != end and not cut and not unknown:
                    self._found.append(
                        Finding(
                            replica="",
                            kind=OFFSETS,
                            position=run.position,
                            detail=f"{run.topic} queue {run.queue_id} goes on with offset "
                            f"{run.first}, not {end}, on all replicas",
                        )
                    )
                ends[key] = (run.end, run.position)

    # -- ends ------------------------------------------------------------------------------

    def _tail(self, folder: ReplicaFolder) -> Tail:
        position, index = self._equal_ends.get(
            folder.name, (folder.anchor.position, folder.anchor.first_index - 1)
        )
        try:
            tail = tail_of(folder, index, position)
        except NewerEntryError as error:
            self._problems.append(f"{error}: audit with the newer version")
            return Tail(index, position, -1)
        finally:
            folder.forget()
        if tail.last_index > self._commit.index:
            more = tail.last_index - self._commit.index
            self._note(folder.name, f"{more} entries behind the commit point are not compared")
        if tail.rest >= 0 and tail.rest >= self._commit.end_position and not folder.running:
            self._note(
                folder.name,
                f"a torn tail: byte {tail.rest} behind the last entry is not zero; the next start "
                "cuts it",
            )
        return tail

    def _note_folders(self) -> None:
        begin = min(folder.anchor.first_index for folder in self._folders)
        for folder in self._folders:
            self._problems += [f"{folder.name}: {problem}" for problem in folder.problems]
            for note in folder.notes:
                self._note(folder.name, note)
            if folder.anchor.first_index > begin:
                self._note(
                    folder.name,
                    f"begins with entry {folder.anchor.first_index}: what is before was removed",
                )
            if folder.mark is None:
                self._note(folder.name, "has no commit mark: nothing in it must be there")
        alone = sum(one.alone for one in self._segments)
        if alone and len(self._folders) > 1:
            self._note("", f"{alone} entries are held by one replica alone")


def _of_queue(mismatch: QueueMismatch) -> Finding:
    return Finding(
        replica=mismatch.replica,
        kind=QUEUE_UNIT,
        file=mismatch.file,
        byte=mismatch.byte,
        count=mismatch.count,
        detail=mismatch.detail,
    )


def sentence(finding: Finding) -> str:
    """Return a finding in one line."""
    place = f"{finding.file} byte {finding.byte}: " if finding.byte >= 0 else ""
    who = f"{finding.replica}: " if finding.replica else ""
    return f"{who}{place}{finding.detail}"


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of one replica's log."""

    last_index: int
    end_position: int
    rest: int


def tail_of(folder: ReplicaFolder, index: int, position: int) -> Tail:
    """Follow a log from the end of entry *index* at *position* on, by its own checksums.

    Raises NewerEntryError: an entry is of a format that this version does not know.
    """
    end = position
    for whole in follow(folder, index, position):
        index, end = whole.header.index, whole.header.end_position
    return Tail(index, end, first_written(folder, after_blank(folder, end)))


Doer = Callable[[Sequence[ReplicaFolder], Sequence[Work]], list[Done]]
"""Does pieces of work and returns the result of each, in their order."""


def audit(
    roots: Sequence[Path],
    doer: Doer | None = None,
    on_done: Callable[[int], object] = lambda _: None,
) -> Report:
    """Compare data folders of one group; nothing is written to any of them.

    *doer* does the work; None: this process, one piece after the other. The report is the same.
    *on_done* is called with how many pieces are done, by this process.

    Raises:
        NotAFolderError: One of them is no data folder.
        StoreError: The file of a log's begin cannot be read.
    """
    folders = [open_folder(root) for root in roots]
    reason = why_not(folders)
    if reason:
        return Report(verdict="unknown", reason=reason)
    works = plan(folders)
    if doer is not None:
        dones = doer(folders, works)
    else:
        dones = []
        for number, work in enumerate(works, start=1):
            dones.append(do(folders, work))
            on_done(number)
    return join(folders, zip(works, dones, strict=True))
