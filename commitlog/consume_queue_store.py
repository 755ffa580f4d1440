"""The consume queues of a log: what they share, which files are open, and their flush.

Making a file takes a millisecond, which a put does not spend: units of a queue that has no file for
them are shared ones (`dledger.commitlog.shared_units`) until a flush has made it.

Spec: docs/reference/formats.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from dledger.commitlog.consume_queue import ConsumeQueue, Sharing
from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.queue_files import ConsumeQueueFlush, Move, QueueFiles
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.seams import Disk
from dledger.commitlog.shared_units import Row, RowKind, SharedUnits

UNITS_PER_FILE: Final = 300_000
"""RocketMQ's file of 6,000,000 bytes."""

MAX_OPEN_FILES: Final = 200
"""Open consume queue files, a descriptor each: they are read by `pread`. 1,024 descriptors is
the usual limit of a process."""

EAGER_QUEUES: Final = 1_000
"""Queues with files that are looked for when the store is opened; with more of them each is looked
for when it is asked for, so that a start does not read a hundred thousand folders."""

MOVED_TOGETHER: Final = 256
"""Queues that one flush gives files of their own: about a quarter of a second of a worker."""


class ConsumeQueueStore:
    """All consume queues below one folder: ``<root>/<topic>/<queue id>/<20-digit byte offset>``.

    Not thread-safe; only the job that `begin_flush` returns may run elsewhere.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        units_per_file: int = UNITS_PER_FILE,
        *,
        max_open_files: int = MAX_OPEN_FILES,
        on_unreadable: Callable[[str, OSError], None] = lambda _path, _error: None,
    ) -> None:
        """Find the queues below *root*.

        Args:
            max_open_files: Files kept open; fewer where the process has no descriptor left.
            on_unreadable: Called with the path of a file that cannot be read, and why.
        Raises:
            ForeignStoreError: Their files have another size.
            CorruptStoreError: Units are lost; after `remove_all` they can be derived again.
        """
        self._disk = disk
        self._root = root
        self.units_per_file = units_per_file
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._queues_of: dict[str, dict[int, ConsumeQueue]] = {}
        self._last_flush: ConsumeQueueFlush | None = None
        self._shared = SharedUnits(disk, shared_folder(root))
        self._files = QueueFiles(disk, root, units_per_file, max_open_files, on_unreadable)
        self.lost = self._files.lost
        self._sharing = Sharing()
        # Those whose shared units the last flush moves into files, in its order.
        self._moving: list[ConsumeQueue] = []
        self._find()

    def _find(self) -> None:
        for topic, tails in self._shared.tails.items():
            for queue_id, tail in tails.items():
                self.queue(topic, queue_id)._take_shared(tail)
        eager = 0
        for topic in sorted(self._files.topics):
            for name in self._disk.list_dir(f"{self._root}/{topic}"):
                if name.isdecimal():
                    self.queue(topic, int(name))._check()
                    eager += 1
                if eager >= EAGER_QUEUES:
                    return

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue; files are made when they are needed."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            if not topic or topic in (".", "..") or "/" in topic or "\0" in topic:
                raise InvariantBroken(f"topic {topic!r} cannot name a folder")
            if queue_id < 0:
                raise InvariantBroken(f"queue id {queue_id} of {topic} is negative")
            queue = ConsumeQueue(self._files, self._sharing, topic, queue_id)
            self._queues[topic, queue_id] = queue
            self._queues_of.setdefault(topic, {})[queue_id] = queue
        return queue

    def queues(self) -> Sequence[ConsumeQueue]:
        """Return the queues that were asked for, or found at the start, in no special order.

        Those with shared units are all among them, those with files while there are less than
        `EAGER_QUEUES`.
        """
        return list(self._queues.values())

    def delete_topic(self, topic: str) -> None:
        """Remove all queues of *topic* and their files; arrays read before stay valid."""
        had_shared = is_moving = False
        for queue in self._queues_of.pop(topic, {}).values():
            del self._queues[topic, queue.queue_id]
            had_shared |= queue._has_shared
            is_moving |= queue._is_moving
            queue._forget()
        if had_shared:
            self._sharing.changes.append(Row(RowKind.TOPIC_DELETED, topic))
        if topic not in self._files.topics:
            return
        folder = f"{self._root}/{topic}"
        self._files.dirty_folders = {
            path for path in self._files.dirty_folders if not f"{path}/".startswith(f"{folder}/")
        }
        if is_moving or topic in self._files.late_topics:
            # Again, perhaps: the flush under way still makes files of the first one of that name.
            self._files.late_topics.add(topic)
            return
        self._remove_folder(topic)

    def _remove_folder(self, topic: str) -> None:
        self._files.topics.discard(topic)
        self._disk.remove_tree(f"{self._root}/{topic}")
        self._files.dirty_folders.add(self._root)  # no flush in a turn of the event loop

    def begin_flush(self) -> ConsumeQueueFlush:
        """Return the job that makes all units put so far durable.

        What an earlier job did not come to is in it again.
        """
        last, self._last_flush = self._last_flush, None
        if last is not None:
            self._end_flush(last)
        moves = self._begin_moves()
        job = ConsumeQueueFlush(
            self._disk,
            sorted(self._files.dirty),
            sorted(self._files.dirty_folders),
            self._shared,
            self._sharing.changes,
            moves,
            self.file_bytes,
        )
        self._last_flush = job
        self._files.dirty = set()
        self._files.dirty_folders = set()
        self._sharing.changes = []
        return job

    def _end_flush(self, job: ConsumeQueueFlush) -> None:
        """Take in what *job*, which has ended, came to."""
        if not job.done:
            self._files.dirty.update(job.paths)
            self._files.dirty_folders.update(job.folders)
            self._sharing.changes = [*job.changes, *self._sharing.changes]
        for queue, move in zip(self._moving, job.moves, strict=True):
            found = job.unreadable.get((move.topic, move.queue_id))
            queue._end_move(move.end if job.has_moved and found is None else None)
            if found is not None and self._queues.get(queue._key) is queue:
                self._files.lose(queue._key, *found)
        for topic in self._files.late_topics:
            self._remove_folder(topic)
        self._files.late_topics.clear()

    def _begin_moves(self) -> list[Move]:
        """Choose queues that get files of their own, as many as one flush is to make."""
        chosen = list(islice(self._sharing.long, MOVED_TOGETHER))
        wanted = MOVED_TOGETHER - len(chosen)
        if not self._sharing.is_half_full:
            # A store of few queues gives each its files, as RocketMQ has them.
            wanted = min(wanted, self._files.most - len(self._files.topics))
        if wanted > 0:
            chosen += [
                queue
                for queue in islice(self._sharing.queues, wanted)
                if queue not in self._sharing.long
            ]
        if self.lost:
            chosen = [queue for queue in chosen if not self.lost.has(queue._key)]
        self._moving = chosen
        return [queue._begin_move() for queue in chosen]

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self.units_per_file * UNIT_BYTES

    @property
    def shared_bytes(self) -> int:
        """Size of the units that are in no file of their queue."""
        return self._sharing.size_bytes

    def flush(self) -> None:
        """Make all units put so far durable. Raises FlushFailedError: the node must stop."""
        self.begin_flush().run()

    def close(self) -> None:
        """Give all descriptors back; what was not flushed stays in the page cache, or is lost."""
        self._shared.close()
        self._files.close()

    def renew_lost(self) -> None:
        """Make a new file for each that the disk does not give back. Blocking.

        Units of all in `lost.filling` are to be put again, then `lost.end` is to be called.

        Raises DiskFullError: some have no new file; to be called again when there is space.
        """
        for key, begin in self.lost.unreadable:
            queue = self._queues.get(key)
            if queue is None or begin not in queue._begins:
                self.lost.forget(key, begin)
                continue
            path = queue._path(begin)
            self._files.drop(path)
            self._disk.unlink(path)
            self._files.create(path)
            self._files.dirty.add(path)
            self.lost.fill(key, begin)


def shared_folder(root: str) -> str:
    """Return where the units of many queues stand together, beside their folder *root*."""
    return f"{root}.shared"


def remove_all(disk: Disk, root: str) -> None:
    """Remove all there is of the queues below *root*: it is to be derived from the log."""
    disk.remove_tree(root)
    disk.remove_tree(shared_folder(root))
