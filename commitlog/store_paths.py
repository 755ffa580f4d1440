"""Where everything lies below a broker's data folder.

::

    commitlog/<20 digits>                    segments, named by the position they start at
    consumequeue/<topic>/<queue>/<20 digits> queue units
    consumequeue.shared/<20 digits>  end     newest units of many queues together
    index/                                   key index files
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


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Names below one data folder. *root* is absolute and ends without a slash."""

    root: str

    def _at(self, *parts: str) -> str:
        return posixpath.join(self.root, *parts)

    @property
    def commitlog(self) -> str:
        """Folder of the segments."""
        return self._at("commitlog")

    def segment(self, base: int) -> str:
        """Return the path of the segment that starts at position *base*."""
        return self._at("commitlog", file_name(base))

    @property
    def consumequeue(self) -> str:
        """Folder of all queues; below it topic, then queue id."""
        return self._at("consumequeue")

    @property
    def shared_units(self) -> str:
        """Folder of the units that are in no file of their queue."""
        return self._at("consumequeue.shared")

    def consume_queue(self, topic: str, queue_id: int) -> str:
        """Return the folder of one queue. A topic has no slash in it."""
        return self._at("consumequeue", topic, str(queue_id))

    @property
    def index(self) -> str:
        """Folder of the key index files."""
        return self._at("index")

    @property
    def key_index_mark(self) -> str:
        """There while the key index lacks no key that a checkpoint covers."""
        return self._at("raft", "keyindex")

    @property
    def checkpoint(self) -> str:
        """The checkpoint file."""
        return self._at("checkpoint")

    @property
    def abort(self) -> str:
        """The abort file: there while a broker runs, left behind by an unclean stop."""
        return self._at("abort")

    @property
    def lock(self) -> str:
        """The lock file that keeps a second broker out."""
        return self._at("lock")

    @property
    def raft(self) -> str:
        """Folder of what is local to this replica."""
        return self._at("raft")

    @property
    def format(self) -> str:
        """How the log of this folder was written."""
        return self._at("raft", "format")

    @property
    def anchor(self) -> str:
        """Where the log begins; missing while it begins at index 1."""
        return self._at("raft", "anchor")

    @property
    def entry_index(self) -> str:
        """Folder of the entry index."""
        return self._at("raft", "entryindex")

    def entry_index_file(self, first: int) -> str:
        """Return the path of the index file whose first unit is that of Raft index *first*."""
        return self._at("raft", "entryindex", file_name(first))

    @property
    def extent(self) -> str:
        """Slot file: how far the log may have been written."""
        return self._at("raft", "extent")

    @property
    def truncation(self) -> str:
        """Slot file: a truncation under way."""
        return self._at("raft", "truncation")

    @property
    def vote(self) -> str:
        """Slot file: term and vote."""
        return self._at("raft", "vote")

    @property
    def commit_mark(self) -> str:
        """Slot file: the newest entry known to be committed and durable."""
        return self._at("raft", "commit_mark")

    @property
    def identity(self) -> str:
        """Cluster, group and incarnation of this replica."""
        return self._at("raft", "identity")

    @property
    def derived_lost(self) -> str:
        """While it is there, queues and key index are to be derived from the log again."""
        return self._at("raft", "derived_lost")

    @property
    def doubt(self) -> str:
        """Why acknowledgements of this replica may be lost; missing while none may be."""
        return self._at("raft", "doubt")

    @property
    def damage(self) -> str:
        """Which entries are damaged and wait for their repair; missing while none is."""
        return self._at("raft", "damage")

    @property
    def snapshot(self) -> str:
        """The tables as of the last checkpoint."""
        return self._at("raft", "snapshot")

    @property
    def install(self) -> str:
        """A leader's snapshot that is being installed; removed when the log has caught up with
        it."""
        return self._at("raft", "install")

    @property
    def installation(self) -> str:
        """Slot file: how far the installation of that snapshot has come."""
        return self._at("raft", "installation")
