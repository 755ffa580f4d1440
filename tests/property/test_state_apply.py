"""Applying entries equals a naive model, record by record; snapshots lose nothing."""

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.derive import derive
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry
from dledger.commitlog.record import encode_record
from dledger.proposals import PendingQueueOffsets
from dledger.state.accounts import AccessChange, AccountConfig
from dledger.state.apply import apply_entry
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    SubscriptionGroupsChange,
    TopicsChange,
    state_batch,
)
from dledger.state.table import StateChange
from dledger.state.tables import StateTables
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig
from tests.harness.extent import examples
from tests.harness.fake_group import STORE_HOST, batch_of, empty_tables

TOPICS = st.sampled_from(["T", "U", "SCHEDULE_TOPIC_XXXX", "%RETRY%g"])
GROUPS = st.sampled_from(["g", "h"])
QUEUES = st.integers(0, 2)

Messages = tuple[str, int, int]

messages = st.tuples(TOPICS, QUEUES, st.integers(1, 12))
topics_change = st.builds(
    lambda name, queues, delete: TopicsChange(
        put=() if delete else (TopicConfig(name, queues, queues),), delete=(name,) if delete else ()
    ),
    st.sampled_from(["T", "U"]),
    st.integers(1, 4),
    st.booleans(),
)
groups_change = st.builds(
    lambda name, times, delete: SubscriptionGroupsChange(
        put=() if delete else (SubscriptionGroupConfig(name, retry_max_times=times),),
        delete=(name,) if delete else (),
    ),
    GROUPS,
    st.integers(0, 20),
    st.booleans(),
)
offsets_change = st.lists(
    st.tuples(GROUPS, TOPICS, QUEUES, st.integers(0, 1 << 40)), min_size=1, max_size=5
).map(lambda items: ConsumerOffsetsChange.of(tuple(items)))
account = st.builds(
    AccountConfig,
    st.sampled_from(["account-a", "account-b", "account-c"]),
    st.sampled_from(["secret-1", "secret-2"]),
    st.booleans(),
    topics=st.dictionaries(TOPICS, st.sampled_from(["PUB", "PUB|SUB"]), max_size=2),
)
access_change = st.builds(
    AccessChange,
    st.lists(account, max_size=2).map(tuple),
    st.lists(st.sampled_from(["account-a", "account-b", "never-there"]), max_size=2).map(tuple),
    st.one_of(st.none(), st.just(""), st.just("10.0.0.*")),
)
delay_step = st.tuples(st.integers(1, 18), st.integers(1, 50))

# Deleting a topic and sending to it never stand in one entry: processors keep them apart.
step = st.one_of(
    st.lists(messages, min_size=1, max_size=6),
    topics_change,
    groups_change,
    offsets_change,
    access_change,
    delay_step,
)


class Model:
    """The state, one dictionary each, one record at a time."""

    def __init__(self) -> None:
        self.ends: dict[tuple[str, int], int] = defaultdict(int)
        self.topics: dict[str, TopicConfig] = {}
        self.groups: dict[str, SubscriptionGroupConfig] = {}
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.progress: dict[int, int] = {}
        self.accounts: dict[str, AccountConfig] = {}
        self.white, self.access_changes = "", 0

    def change(self, change: StateChange) -> None:
        if isinstance(change, TopicsChange):
            for config in change.put:
                self.topics[config.topic] = config
            for name in change.delete:
                self.topics.pop(name, None)
                self.ends = defaultdict(
                    int, {key: end for key, end in self.ends.items() if key[0] != name}
                )
                self.offsets = {
                    key: offset for key, offset in self.offsets.items() if key[1] != name
                }
        elif isinstance(change, SubscriptionGroupsChange):
            for group in change.put:
                self.groups[group.group_name] = group
            for name in change.delete:
                self.groups.pop(name, None)
        elif isinstance(change, ConsumerOffsetsChange):
            for group_name, topics in change.offsets.items():
                for topic, queues in topics.items():
                    for queue_id, offset in queues.items():
                        self.offsets[group_name, topic, queue_id] = offset
        elif isinstance(change, DelayProgressChange):
            self.progress[change.level] = change.to_offset
        elif isinstance(change, AccessChange):
            for account in change.put:
                self.accounts[account.access_key] = account
            for name in change.delete:
                self.accounts.pop(name, None)
            self.white = self.white if change.white_addresses is None else change.white_addresses
            self.access_changes += 1

    def check(self, tables: StateTables) -> None:
        ends = {key: bounds.max_offset for key, bounds in tables.queues.items()}
        assert ends == {key: end for key, end in self.ends.items() if end}
        assert tables.topics == self.topics
        assert tables.subscription_groups == self.groups
        assert tables.delay_progress == self.progress
        assert tables.accounts == self.accounts
        assert (tables.white_addresses, tables.access_counter) == (self.white, self.access_changes)
        offsets = {
            (group, topic, queue_id): offset
            for (group, topic), by_queue in tables.consumer_offsets.items()
            for queue_id, offset in by_queue.items()
        }
        assert offsets == self.offsets


def batch_for(model: Model, item: Any) -> RecordBatch:
    """Return the batch a leader would propose, and tell the model."""
    if isinstance(item, list):
        records, runs = [], []
        for topic, queue_id, count in item:
            records += [
                encode_record(
                    topic=topic, queue_id=queue_id, body=b"b%d" % i, properties=b"TAGS\x01a\x02"
                )
                for i in range(count)
            ]
            runs.append(Run(topic, queue_id, count))
            model.ends[topic, queue_id] += count
        return batch_of(records, *runs)
    if isinstance(item, tuple):
        level, more = item
        at = model.progress.get(level, 0)
        item = DelayProgressChange(level, at, at + more)
    batch = state_batch(item)
    for run in batch.runs:
        model.ends[run.topic, run.queue_id] += run.count
    model.change(item)
    return batch


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(step, min_size=1, max_size=4), min_size=1, max_size=6))
def test_apply_equals_the_model(entries: list[list[Any]]) -> None:
    tables = empty_tables()
    offsets = PendingQueueOffsets(tables)
    model = Model()
    position, chain = 0, 0
    index = 0
    for items in entries:
        deleting = {
            name for item in items if isinstance(item, TopicsChange) for name in item.delete
        }
        kept = [
            item
            for item in items
            if not (isinstance(item, list) and any(topic in deleting for topic, _, _ in item))
        ]
        batches = [batch_for(model, item) for item in kept]
        if not batches:
            continue
        index += 1
        runs = [run for batch in batches for run in batch.runs]
        first_offsets, following = offsets.plan(runs)
        offsets.keep(following)
        frame = seal_entry(
            batches,
            first_offsets,
            index=index,
            term=1,
            position=position,
            prev_chain=chain,
            store_time_ms=1000 + index,
            store_host=STORE_HOST,
        )
        header = parse_header(frame)
        applied = apply_entry(tables, frame, header, derive(frame, header))
        offsets.forget_topics(applied.deleted_topics)
        position, chain = header.end_position, header.chain
        assert sum(len(item.units) for item in applied.units) == header.record_count
        model.check(tables)
    restored = load(snapshot(tables), tables)
    assert restored == tables
    assert snapshot(restored) == snapshot(tables)
