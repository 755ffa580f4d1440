"""Data folders of several replicas of one group, made by the broker's own store.

Small: every byte of them can be looked at. Segments of 4 KiB, three queues, tags, keys, a topic
that is deleted and made again, delayed messages.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry, seal_no_op
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.record import encode_record, pack_host
from dledger.settings.tables import StoreTable
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.tables import StateTables
from dledger.state.topics import TopicConfig
from dledger.store import ReplicaStore

SEGMENT_BYTES = 4096
START_MS = 1_700_000_000_000
HOST = pack_host("127.0.0.1", 10911)


def settings(root: Path) -> StoreTable:
    """Return the sizes of a small folder."""
    return StoreTable(
        path_root_dir=str(root),
        mapped_file_size_commit_log=SEGMENT_BYTES,
        mapped_file_size_consume_queue=16 * UNIT_BYTES,
        message_delay_level="1s 5s",
    )


def message(topic: str, queue_id: int, body: bytes, *, tag: str = "", keys: str = "") -> bytes:
    """Return one encoded record."""
    pairs = {"UNIQ_KEY": f"{topic}{queue_id}{body.hex()}", "TAGS": tag, "KEYS": keys}
    properties = "".join(f"{k}\x01{v}\x02" for k, v in pairs.items() if v)
    return encode_record(topic=topic, queue_id=queue_id, body=body, properties=properties.encode())


@dataclass
class Writer:
    """Makes the entries that a leader would make, each fitting the one before."""

    seed: int = 1
    term: int = 1
    index: int = 0
    chain: int = 0
    end: int = 0
    time_ms: int = START_MS
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    frames: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def place(self, size: int) -> int:
        """Return where the next frame begins."""
        free_bytes = SEGMENT_BYTES - self.end % SEGMENT_BYTES
        return self.end if size + 8 <= free_bytes else self.end + free_bytes

    def _keep(self, frame: bytes) -> None:
        header = parse_header(frame)
        self.index, self.chain, self.end = header.index, header.chain, header.end_position
        self.time_ms += self.rng.randrange(2_000)
        self.frames.append(frame)

    def no_op(self) -> None:
        """Add the entry a term begins with."""
        place = self.place(72)
        self._keep(seal_no_op(self.index + 1, self.term, place, self.chain, self.time_ms))

    def batch(self, batch: RecordBatch) -> None:
        """Add an entry of one batch."""
        size = 72 + 4 * len(batch.sizes) + int(batch.sizes.sum())
        firsts = []
        for run in batch.runs:
            firsts.append(self.offsets.get((run.topic, run.queue_id), 0))
            self.offsets[run.topic, run.queue_id] = firsts[-1] + run.count
        self._keep(
            bytes(
                seal_entry(
                    [batch],
                    firsts,
                    index=self.index + 1,
                    term=self.term,
                    position=self.place(size),
                    prev_chain=self.chain,
                    store_time_ms=self.time_ms,
                    store_host=HOST,
                )
            )
        )

    def messages(self, topic: str, queue_id: int, count: int) -> None:
        """Add an entry of messages of one queue, some with a tag or keys."""
        records = [
            message(
                topic,
                queue_id,
                self.rng.randbytes(self.rng.randrange(1, 60)),
                tag=self.rng.choice(["", "a", "b"]),
                keys=self.rng.choice(["", "k1", "k1 k2"]),
            )
            for _ in range(count)
        ]
        sizes = np.array([len(record) for record in records], np.uint32)
        self.batch(RecordBatch(b"".join(records), sizes, (Run(topic, queue_id, count),)))

    def topics(self, *, put: Sequence[str] = (), delete: Sequence[str] = ()) -> None:
        """Add an entry that creates or deletes topics."""
        configs = tuple(TopicConfig(topic, 2, 2, 6) for topic in put)
        self.batch(state_batch(TopicsChange(configs, tuple(delete))))
        for topic in delete:
            self.offsets = {key: end for key, end in self.offsets.items() if key[0] != topic}

    def some(self, entries: int) -> None:
        """Add entries of messages over three queues and the schedule topic."""
        for _ in range(entries):
            topic, queue_id = self.rng.choice(
                [("T", 0), ("T", 1), ("U", 0), ("SCHEDULE_TOPIC_XXXX", 0)]
            )
            self.messages(topic, queue_id, self.rng.randrange(1, 4))


def usual(entries: int = 30) -> Writer:
    """Return a log with everything in it that an audit has to know."""
    writer = Writer()
    fill(writer, entries)
    return writer


def fill(writer: Writer, entries: int = 30) -> None:
    """Add the entries of `usual`."""
    writer.no_op()
    writer.topics(put=["T", "U"])
    writer.some(entries // 2)
    writer.messages("U", 1, 3)
    writer.topics(delete=["U"])
    writer.topics(put=["U"])
    writer.messages("U", 0, 1)
    writer.term = 2
    writer.no_op()
    writer.some(entries - entries // 2)


def write_folder(
    root: Path,
    frames: Sequence[bytes],
    *,
    commit: int | None = None,
    clean: bool = True,
    floor: int = 0,
    tail: bytes = b"",
    queue_files: int = MAX_OPEN_FILES,
) -> Path:
    """Write a replica's folder with the broker's own store and return it.

    Args:
        commit: Newest entry it knows to be committed; None: all.
        clean: Whether it stopped with a checkpoint and an exact extent.
        floor: Number of whole segments it has given up at the front.
        tail: Bytes behind the last entry, as a torn write leaves them; needs *clean* off.
        queue_files: Consume queue files that may be open; units of other queues are shared.
    """
    store = ReplicaStore(OsDisk(), settings(root), StateTables, queue_files_max=queue_files)
    commit = len(frames) if commit is None else commit
    for frame in frames:
        store.log.append(frame)
    store.log.flush()
    for index in range(1, commit + 1):
        store.apply(index)
    taken = store.begin_checkpoint(commit)
    assert taken is not None
    taken.write()
    if floor:
        first = next(
            index
            for index in range(1, commit + 1)
            if store.log.position_at(index) >= floor * SEGMENT_BYTES
        )
        anchor = store.log.anchor_at(first)
        if store.log.drop_before(anchor):
            store.derived.delete_before(anchor, store.tables)
    if tail:
        with Path(
            store.paths.segment(store.log.end_position // SEGMENT_BYTES * SEGMENT_BYTES)
        ).open("r+b") as file:
            file.seek(store.log.end_position % SEGMENT_BYTES)
            file.write(tail)
    store.log.close(clean=clean)
    store.close(clean=clean)
    return root


def write_group(
    root: Path, frames: Sequence[bytes], size: int = 3, *, queue_files: int = MAX_OPEN_FILES
) -> list[Path]:
    """Write equal folders of *size* replicas."""
    return [
        write_folder(root / f"n{number}", frames, queue_files=queue_files) for number in range(size)
    ]


def flip(path: Path, byte: int, mask: int = 0x10) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ mask]))


def install_at_once(store: ReplicaStore, data: bytes, commit_index: int) -> bool:
    """Install a leader's snapshot, all steps in one go; False when it is not needed."""
    loaded = store.decode(data)
    if not store.needs(loaded, commit_index):
        return False
    store.offer(data)
    store.installing = True
    store.take_over(loaded, store.empty_for(loaded)).close(clean=False)
    store._reserve()
    return True
