"""Where everything lies below a broker's data folder.

::

    commitlog/<20 digits>                    segments, named by the position they start at
    consumequeue/<topic>/<queue>/<20 digits> queue units
    consumequeue.shared/<20 digits>  end     newest units of many queues together
    index/<20 digits>-<20 digits>            runs of the key index
    config/                                  what operators look for there
    checkpoint  abort  lock                  as RocketMQ has them
    raft/                                    what makes the log a Raft log, local to this node
        format  anchor                       how the folder was written; where the log begins
        entryindex/<20 digits>               fixed-width unit per entry
        extent  truncation                   slot files of the log itself
        vote  commit_mark                    slot files of the consensus layer
        identity  snapshot/                  this replica's name; local snapshots of the tables
        doubt                                why what it acknowledged may be lost
        derived_lost                         queues and key index are derived from the log again
        install  installation                a leader's snapshot that is taken in; how far that is

Spec: docs/reference/formats.md.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Final

NAME_DIGITS: Final = 20
"""Digits in the name of a segment, an index file or a queue file."""


def file_name(start: int) -> str:
    """Return the name of the file whose first byte (or unit) is number *start*."""
    return f"{start:0{NAME_DIGITS}d}"


def parse_file_name(name: str) -> int | None:
    """Return the start a file is named by, or None when the name is not of that kind."""
    if len(name) != NAME_DIGITS or not (name.isascii() and name.isdecimal()):
        return None
    return int(name)


class _Path:
    """A name below the data folder."""

    def __init__(self, below: str) -> None:
        self._below = below

    def __get__(self, paths: StorePaths, _owner: type[StorePaths]) -> str:
        return posixpath.join(paths.root, self._below)


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Names below one data folder. *root* is absolute and ends without a slash."""

    root: str

    commitlog = _Path("commitlog")
    """Folder of the segments."""
    consumequeue = _Path("consumequeue")
    """Folder of all queues; below it topic, then queue id."""
    shared_units = _Path("consumequeue.shared")
    """Folder of the units that are in no file of their queue."""
    index = _Path("index")
    """Folder of the key index files."""
    checkpoint = _Path("checkpoint")
    """The checkpoint file."""
    abort = _Path("abort")
    """The abort file: there while a broker runs, left behind by an unclean stop."""
    lock = _Path("lock")
    """The lock file that keeps a second broker out."""
    raft = _Path("raft")
    """Folder of what is local to this replica."""
    format = _Path("raft/format")
    """How the log of this folder was written."""
    anchor = _Path("raft/anchor")
    """Where the log begins; missing while it begins at index 1."""
    entry_index = _Path("raft/entryindex")
    """Folder of the entry index."""
    extent = _Path("raft/extent")
    """Slot file: how far the log may have been written."""
    truncation = _Path("raft/truncation")
    """Slot file: a truncation under way."""
    vote = _Path("raft/vote")
    """Slot file: term and vote."""
    commit_mark = _Path("raft/commit_mark")
    """Slot file: the newest entry known to be committed and durable."""
    identity = _Path("raft/identity")
    """Cluster, group and incarnation of this replica."""
    derived_lost = _Path("raft/derived_lost")
    """While it is there, queues and key index are to be derived from the log again."""
    doubt = _Path("raft/doubt")
    """Why acknowledgements of this replica may be lost; missing while none may be."""
    damage = _Path("raft/damage")
    """Which entries are damaged and wait for their repair; missing while none is."""
    snapshot = _Path("raft/snapshot")
    """The tables as of the last checkpoint."""
    install = _Path("raft/install")
    """A leader's snapshot that is being installed; removed when the log has caught up with it."""
    installation = _Path("raft/installation")
    """Slot file: how far the installation of that snapshot has come."""

    def segment(self, base: int) -> str:
        """Return the path of the segment that starts at position *base*."""
        return posixpath.join(self.root, "commitlog", file_name(base))

    def consume_queue(self, topic: str, queue_id: int) -> str:
        """Return the folder of one queue. A topic has no slash in it."""
        return posixpath.join(self.root, "consumequeue", topic, str(queue_id))

    def entry_index_file(self, first: int) -> str:
        """Return the path of the index file whose first unit is that of Raft index *first*."""
        return posixpath.join(self.root, "raft", "entryindex", file_name(first))
