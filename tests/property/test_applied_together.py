"""Entries applied together leave what one after the other leaves: tables, queues, key index."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import Run
from dledger.state.snapshot import snapshot
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    ProducerOpenedChange,
    ProducerSendChange,
    state_batch,
)
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from tests.harness.extent import examples
from tests.harness.fake_group import batch_of
from tests.harness.replica_folders import Writer, message
from tests.harness.replica_folders import settings as small

TOPICS = st.sampled_from(["T", "T", "U", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"])
step = st.one_of(
    st.tuples(st.just("messages"), TOPICS, st.integers(0, 1), st.integers(1, 9)),
    st.tuples(st.just("messages"), TOPICS, st.integers(0, 1), st.integers(1, 9)),
    st.tuples(st.just("stamped"), st.sampled_from(["T", "U"]), st.integers(1, 3)),
    st.tuples(st.just("offset"), st.integers(0, 99)),
    st.just(("opened",)),
    st.just(("deleted",)),
    st.just(("no-op",)),
)


class Producer:
    """One idempotent producer, as the broker notes its sends."""

    def __init__(self) -> None:
        self.epoch = self.sequence = 0

    def note(self) -> ProducerSendChange:
        self.sequence += 1
        first_open = max(1, self.sequence - 2)
        return ProducerSendChange(b"p" * 16, self.epoch, self.sequence, first_open, ())


def write(writer: Writer, producer: Producer, item: tuple[Any, ...]) -> None:
    match item:
        case ("messages", topic, queue_id, count):
            writer.messages(topic, queue_id, count)
        case ("stamped", topic, count):
            note = state_batch(producer.note())
            bodies = [message(topic, 0, b"%d" % n, keys=f"k{n}") for n in range(count)]
            run = Run(topic, 0, count)
            writer.batch(batch_of([bytes(note.records), *bodies], *note.runs, run))
        case ("offset", offset):
            writer.batch(state_batch(ConsumerOffsetsChange.of((("g", "T", 0, offset),))))
        case ("opened",):
            writer.batch(state_batch(ProducerOpenedChange(b"p" * 16)))
            producer.epoch, producer.sequence = writer.index, 0
        case ("deleted",):
            writer.topics(delete=["U"])
            writer.topics(put=["U"])
        case _:
            writer.no_op()


def opened(root: Path, frames: list[bytes]) -> ReplicaStore:
    store = ReplicaStore(OsDisk(), small(root), StateTables)
    for frame in frames:
        store.log.append(frame)
    store.log.flush()
    return store


def files_of(store: ReplicaStore) -> dict[str, bytes]:
    """Return the checkpoint's tables and all derived files."""
    taken = store.begin_checkpoint(store.log.last_index)
    assert taken is not None
    taken.write()
    root = Path(store.paths.root)
    store.close(clean=True)
    kept = [path for path in root.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in kept
        if path.relative_to(root).parts[0] in ("consumequeue", "index")
    }


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(step, min_size=2, max_size=30), st.lists(st.integers(1, 20), min_size=1))
def test_apply_next_equals_apply(items: list[tuple[Any, ...]], stops: list[int]) -> None:
    writer, producer = Writer(), Producer()
    writer.topics(put=["T", "U"])
    for item in items:
        write(writer, producer, item)
    with TemporaryDirectory() as folder:
        alone = opened(Path(folder, "alone"), writer.frames)
        units: list[tuple[str, int, int, int]] = []
        for index in range(1, writer.index + 1):
            for part in alone.apply(index).units:
                units += [
                    (part.topic, part.queue_id, part.first + n, int(unit["phy_offset"]))
                    for n, unit in enumerate(part.units)
                ]
        together = opened(Path(folder, "together"), writer.frames)
        found: list[tuple[str, int, int, int]] = []
        turn = 0
        while together.derived_index < writer.index:
            last = min(writer.index, together.derived_index + stops[turn % len(stops)])
            for part in together.apply_next(last).units:
                found += [
                    (part.topic, part.queue_id, part.first + n, int(unit["phy_offset"]))
                    for n, unit in enumerate(part.units)
                ]
            assert together.derived_index <= last
            turn += 1
        assert sorted(found) == sorted(units)
        assert together.tables == alone.tables
        assert snapshot(together.tables) == snapshot(alone.tables)
        assert files_of(together) == files_of(alone)


def test_apply_next_applies_messages_together(tmp_path: Path) -> None:
    writer, producer = Writer(), Producer()
    writer.topics(put=["T"])
    for _ in range(5):
        write(writer, producer, ("stamped", "T", 2))
    writer.topics(delete=["T"])
    store = opened(tmp_path, writer.frames)
    ends = [store.apply_next(writer.index).index]
    while ends[-1] < 6:
        ends.append(store.apply_next(6).index)
    assert ends == [1, 6]
    assert store.apply_next(writer.index).deleted_topics == ("T",)
    assert snapshot(store.tables)
    store.close(clean=False)
