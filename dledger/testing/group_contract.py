"""What `dledger.group_api.BrokerGroup` demands of every implementation, as a check.

It is for a group that leads and answers when a majority has an entry (``SYNC_MASTER``).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.record import decode_record, encode_record
from dledger.group_api import BrokerGroup, Proposed, QueueTouched
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.topics import TopicConfig
from dledger.testing.contract import require, require_error, unwrapped

LIMIT_S: Final = 30.0
"""Nothing here takes so long; what does hangs."""

LOOK_S: Final = 0.005
SUBMITTERS: Final = 20
TOPIC: Final = "check_broker_group"
KEYED: Final = b"KEYS\x01contract\x02"

Settle = Callable[[], Awaitable[None]]


def _batch(*runs: tuple[int, Sequence[bytes]], topic: str = TOPIC) -> RecordBatch:
    """Return a batch with a run for each queue id and its bodies."""
    records = [
        encode_record(topic=topic, queue_id=queue_id, body=body, properties=KEYED)
        for queue_id, bodies in runs
        for body in bodies
    ]
    return RecordBatch(
        b"".join(records),
        np.array([len(record) for record in records], np.uint32),
        tuple(Run(topic, queue_id, len(bodies)) for queue_id, bodies in runs),
    )


async def _until(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds, `LIMIT_S` at most."""
    with trio.move_on_after(LIMIT_S):
        while True:
            if condition():
                return
            await trio.sleep(LOOK_S)


@dataclass(slots=True, eq=False)
class _Proposer:
    """Proposes batches and keeps every answer."""

    group: BrokerGroup
    settle: Settle | None
    answers: list[list[Proposed]] = field(default_factory=list)

    def propose(self, batch: RecordBatch) -> list[Proposed]:
        """Propose *batch*; return the list that its one answer will be in."""
        found: list[Proposed] = []
        self.answers.append(found)
        settled: list[Proposed] = []
        proposing = True

        def on_done(proposed: Proposed) -> None:
            require(not proposing, "propose never answers from inside the call")
            require(not found, "a proposal is answered exactly once")
            if proposed.outcome != "unknown":
                require(len(settled) == 1, "what is decided is settled first, and once")
                require(settled[0].outcome == proposed.outcome, "as it is answered")
            if proposed.outcome == "stored":
                applied = self.group.state.applied_index
                require(applied >= proposed.index, "a stored batch is applied when it is answered")
            found.append(proposed)

        self.group.propose(batch, on_done, settled=[settled.append])
        proposing = False
        return found

    async def answered(self, *waiting: list[Proposed]) -> list[Proposed]:
        """Have everything sealed, and return the answers."""
        self.group.kick()
        if self.settle is not None:
            await self.settle()
        await _until(lambda: all(waiting))
        require(all(waiting), "what is proposed and kicked is answered in time")
        return [found[0] for found in waiting]

    async def stored(self, *batches: RecordBatch) -> list[Proposed]:
        """Propose batches one after the other, in one turn; all of them are stored."""
        answers = await self.answered(*[self.propose(batch) for batch in batches])
        outcomes = {answer.outcome for answer in answers}
        require(outcomes == {"stored"}, f"a leader's entries are stored, not {sorted(outcomes)}")
        return answers


@unwrapped
async def check_broker_group(
    group: BrokerGroup, *, settle: Settle | None = None, end_leadership: Settle | None = None
) -> None:
    """Check that *group*, which leads, keeps the contract of its interface.

    It makes a topic of its own, stores messages and deletes the topic.

    Args:
        settle: Appends and applies what was proposed and kicked, where a test does that by hand.
        end_leadership: Ends this leadership; returns when it has ended. It is the last thing done.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    leadership = group.leadership
    require(leadership is not None, "the group to check leads")
    assert leadership is not None
    require(leadership.term == group.term > 0, "a leadership has the newest term")
    require(group.leader_address, "a leader knows its own address")
    require(group.group_identity, "a group that leads has an identity")
    require(group.readable, "a leader can be read")
    status = group.status()
    json.dumps(status)
    require(status["term"] == group.term, "the status names the term")
    proposer = _Proposer(group, settle)
    await _check_stored(proposer)
    await _check_order(proposer)
    await _check_submit(proposer)
    await _check_listeners(proposer)
    await _check_too_large(proposer)
    await _check_barrier(group)
    await _check_deleted_topic(proposer)
    if end_leadership is not None:
        await _check_end(proposer, end_leadership)
    require(
        all(len(found) == 1 for found in proposer.answers), "every proposal is answered, and once"
    )


async def _check_stored(proposer: _Proposer) -> None:
    group, bodies = proposer.group, (b"first", b"the second")
    config = TopicConfig(TOPIC, 4, 4)
    await proposer.stored(state_batch(TopicsChange(put=(config,))))
    first = group.state.max_offset(TOPIC, 1)
    (answer,) = await proposer.stored(_batch((1, bodies)))
    require(answer.first_offsets == (first,), "a run begins where its queue ended")
    require(group.state.max_offset(TOPIC, 1) == first + 2, "a queue grows by the run's count")
    require(answer.term == group.term, "an entry has the term it was appended in")
    require(answer.index <= group.log.index_of(group.log.end_position - 1), "and lies in the log")
    require(group.log.index_of(answer.phy_offset) == answer.index, "at the position that was named")
    at = answer.phy_offset
    for number, body in enumerate(bodies):
        record = decode_record(group.log.record_at(at))
        require(bytes(record.body) == body, "records of a batch stand one behind the other")
        require(record.queue_offset == first + number, "records have the offsets of their queue")
        require(record.phy_offset == at, "records have the position they stand at")
        require(record.store_timestamp_ms == answer.store_time_ms, "and the entry's store time")
        require(bytes(group.log.read(at, record.size)[4:8]) != b"", "bytes of the log can be read")
        at += record.size
    units = group.queues.queue(TOPIC, 1).read(first, 2)
    require(int(units["phy_offset"][0]) == answer.phy_offset, "units of a queue name their records")
    require(int(units["phy_offset"][1]) > answer.phy_offset, "each its own")
    if not group.key_index.is_behind:
        at = answer.phy_offset
        found = group.key_index.query(TOPIC, "contract", 10, at, at + 1)
        require(answer.phy_offset in found, "the key index knows applied records by their keys")


async def _check_order(proposer: _Proposer) -> None:
    """Batches proposed in one turn keep their order, also where they share queues."""
    group = proposer.group
    ends = [group.state.max_offset(TOPIC, queue_id) for queue_id in range(3)]
    one, two, three = await proposer.stored(
        _batch((0, [b"a", b"b"]), (2, [b"c"])),
        _batch((2, [b"d"]), (0, [b"e"]), (2, [b"f", b"g"])),
        _batch((0, [b"h"])),
    )
    require(one.first_offsets == (ends[0], ends[2]), "every run has its first offset, in order")
    require(
        two.first_offsets == (ends[2] + 1, ends[0] + 2, ends[2] + 2),
        "runs continue those of batches before them, and of their own batch",
    )
    require(three.first_offsets == (ends[0] + 3,), "no offset is given twice or left out")
    require(one.phy_offset < two.phy_offset < three.phy_offset, "positions follow the order, too")
    require(one.index <= two.index <= three.index, "so do entries")
    require(
        one.store_time_ms <= two.store_time_ms <= three.store_time_ms, "store times never go back"
    )


async def _check_submit(proposer: _Proposer) -> None:
    group, offsets = proposer.group, list[int]()
    end = group.state.max_offset(TOPIC, 3)

    async def submit(number: int) -> None:
        answer = await group.submit(_batch((3, [b"%d" % number])))
        require(answer.outcome == "stored", "submit returns stored proposals only")
        offsets.extend(answer.first_offsets)

    with trio.move_on_after(LIMIT_S) as scope:
        async with trio.open_nursery() as nursery:
            for number in range(SUBMITTERS):
                nursery.start_soon(submit, number)
    require(not scope.cancelled_caught, "submit needs no kick")
    require(
        sorted(offsets) == list(range(end, end + SUBMITTERS)),
        "batches submitted at once get one offset each, without a gap",
    )


async def _check_listeners(proposer: _Proposer) -> None:
    group, heard = proposer.group, list[QueueTouched]()

    def listener(touched: Sequence[QueueTouched]) -> None:
        heard.extend(each for each in touched if each[0] == TOPIC)

    group.on_applied.append(listener)
    (answer,) = await proposer.stored(_batch((1, [b"x", b"y"])))
    await _until(lambda: bool(heard))
    group.on_applied.remove(listener)
    end = answer.first_offsets[0] + 2
    require(heard == [(TOPIC, 1, end)], "a listener gets each touched queue and its new end, once")


async def _check_too_large(proposer: _Proposer) -> None:
    group, end = proposer.group, proposer.group.log.end_position
    answers: list[Proposed] = []
    body = bytes(1 << 20)
    with require_error(LocalProtocolError, "a proposal larger than any entry"):
        # No entry is larger than 64 MiB, and none than the segment it stands in.
        group.propose(_batch((0, [body] * 64)), answers.append)
    require(group.log.end_position == end and not answers, "nothing of it is stored or answered")


async def _check_barrier(group: BrokerGroup) -> None:
    answers: list[NotLeaderError | None] = []
    group.read_barrier(answers.append)
    await _until(lambda: bool(answers))
    await trio.sleep(LOOK_S)
    require(answers == [None], "a leader answers a read barrier exactly once")


async def _check_deleted_topic(proposer: _Proposer) -> None:
    group = proposer.group
    require(group.state.max_offset(TOPIC, 0) > 0, "there is something to delete")
    await proposer.stored(state_batch(TopicsChange(delete=(TOPIC,))))
    require(group.state.max_offset(TOPIC, 0) == 0, "a deleted topic has no queues")
    await proposer.stored(state_batch(TopicsChange(put=(TopicConfig(TOPIC, 4, 4),))))
    (answer,) = await proposer.stored(_batch((0, [b"again"])))
    require(answer.first_offsets == (0,), "queues of a topic made again begin at 0")
    units = group.queues.queue(TOPIC, 0).read(0, 1)
    require(int(units["phy_offset"][0]) == answer.phy_offset, "and hold what came since, alone")


async def _check_end(proposer: _Proposer, end_leadership: Settle) -> None:
    group = proposer.group
    waiting = proposer.propose(_batch((0, [b"waits"])))
    await end_leadership()
    require(group.leadership is None, "a leadership that has ended is no longer shown")
    # As stored, too, where the next leader had it and committed it.
    await _until(lambda: bool(waiting))
    require(len(waiting) == 1, "what was proposed before is answered after the end as well")
    refused: list[object] = []
    with require_error(NotLeaderError, "a proposal to one that does not lead"):
        group.propose(_batch((0, [b"late"])), refused.append)
    with require_error(NotLeaderError, "a read barrier of one that does not lead"):
        group.read_barrier(refused.append)
    with require_error(NotLeaderError, "submit to one that does not lead"):
        await group.submit(_batch((0, [b"late"])))
    await trio.sleep(LOOK_S)
    require(not refused, "what is refused with an error is not answered as well")
