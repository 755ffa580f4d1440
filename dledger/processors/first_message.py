"""A topic is made by the same entry that holds its first message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commitlog.entry import RecordBatch, Run
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.services.pending_configs import TopicView
from dledger.state.state_record import StateRecord, TopicsChange, state_record
from dledger.state.topic_config import TopicConfig


def propose_with_topic(
    group: BrokerGroup,
    topics: TopicView,
    create: TopicConfig | None,
    records: Sequence[bytes],
    target: Run,
    on_done: OnDone,
    *,
    noted: StateRecord | None = None,
    ahead: StateRecord | None = None,
) -> int:
    """Propose *records*, all for *target*, behind the topic *create* if there is one to make.

    Args:
        noted: Stands right before *records*.
        ahead: Stands before *noted*.
    Returns:
        How many bytes of the proposal come before the first of *records*.
    Raises:
        MQError: What `BrokerGroup.propose` raises; nothing was stored, *on_done* is not called.
    """
    if create is None and noted is None and ahead is None:
        sizes = np.array([len(record) for record in records], np.uint32)
        group.propose(RecordBatch(records=b"".join(records), sizes=sizes, runs=(target,)), on_done)
        return 0
    made: OnDone | None = None

    def done(proposed: Proposed) -> None:
        if made is not None:
            made(proposed)
        on_done(proposed)

    heads = [] if create is None else [state_record(TopicsChange(put=(create,)))]
    heads += [head for head in (ahead, noted) if head is not None]
    every = (*(head.record for head in heads), *records)
    batch = RecordBatch(
        records=b"".join(every),
        sizes=np.array([len(record) for record in every], np.uint32),
        runs=(*(head.run for head in heads), target),
    )
    group.propose(batch, done)
    if create is not None:
        made = topics.pending.put(create.topic, create)
    return sum(len(head.record) for head in heads)
