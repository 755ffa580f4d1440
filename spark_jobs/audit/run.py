"""An audit of data folders in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spark_jobs.audit.answer import join
from spark_jobs.audit.finding import Report
from spark_jobs.audit.folder import ReplicaFolder, open_folder
from spark_jobs.audit.work import Done, Work, do, plan, why_not

Doer = Callable[[Sequence[ReplicaFolder], Sequence[Work]], list[Done]]
"""Does pieces of work and returns what each says, in their order."""


def audit(
    roots: Sequence[Path],
    doer: Doer | None = None,
    on_done: Callable[[int], object] = lambda _: None,
) -> Report:
    """Compare data folders of one group; nothing is written to any of them.

    Args:
        doer: Who does the work; None: this process, one piece after the other.
        on_done: Told how many pieces are done, by this process.
    Returns:
        The same report whoever does the work.
    Raises:
        NotAFolderError: One of them is no data folder.
        StoreError: A file that says where a log begins cannot be read.
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
