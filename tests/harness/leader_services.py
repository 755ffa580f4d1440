"""The processors of a broker and all services of a leader over the fake group, on virtual time."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.record import Record, decode_record, encode_record
from dledger.group_api import OffsetCommit, OnDone
from dledger.processors.transactions import CheckBack
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import TimerMessageService
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings.tables import BrokerTable, StoreTable
from dledger.testing.doubles import VirtualClock
from tests.harness.broker import LEVELS_MS, Broker
from tests.harness.fake_group import SEGMENT_BYTES, FakeGroup, batch_of

DAY_S = 24 * 3600


class ServedGroup:
    """The fake group on virtual time, with services that run as long as a leadership."""

    def __init__(self, root: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.clock = VirtualClock()
        self.group = FakeGroup(root, self.clock, segment_bytes=segment_bytes)
        self.scope = trio.CancelScope()

    def put(self, topic: str, queue_id: int, records: list[bytes]) -> int:
        """Store encoded records, whatever processors would say; return the first's position."""
        placed: list[int] = []
        self.group.propose(
            batch_of(records, Run(topic, queue_id, len(records))),
            lambda done: placed.append(done.phy_offset),
        )
        self.group.settle()
        return placed[0]

    def read(self, topic: str = "T", queue_id: int = 0) -> list[Record]:
        """Return what stands in a queue; each body fits its checksum."""
        count = self.group.state.max_offset(topic, queue_id)
        if not count:
            return []
        units = self.group.queues.queue(topic, queue_id).read(0, count)
        return [
            decode_record(bytes(self.group.log.record_at(position)))
            for position in units["phy_offset"].tolist()
        ]

    def bodies(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        """Return the bodies in a queue."""
        return [bytes(record.body) for record in self.read(topic, queue_id)]

    async def lead(self, *services: Callable[[], Awaitable[None]]) -> None:
        """Run *services* until the leadership ends; what one of them raises comes out."""
        self.scope = trio.CancelScope()
        with self.scope:
            async with trio.open_nursery() as nursery:
                for service in (*services, self.group.turns.run):
                    nursery.start_soon(service)

    async def settle_kicked(self, pause_s: float = 0.01) -> None:
        """What is proposed and only kicked becomes an entry, as in a group with a disk."""
        propose = self.group.propose
        proposed = trio.Event()

        def noted(
            batch: RecordBatch,
            on_done: OnDone,
            *,
            is_applied: bool = True,
            settled: Sequence[OnDone] = (),
            commits: Sequence[OffsetCommit] = (),
        ) -> None:
            propose(batch, on_done, is_applied=is_applied, settled=settled, commits=commits)
            proposed.set()

        self.group.propose = noted  # type: ignore[method-assign]  # counts calls
        if self.group.waiting:
            proposed.set()
        try:
            while True:
                await proposed.wait()
                proposed = trio.Event()
                await trio.sleep(pause_s)
                if self.group.waiting:
                    self.group.settle()
        finally:
            self.group.propose = propose  # type: ignore[method-assign]  # as before

    def depose(self) -> None:
        """End the leadership and its services."""
        self.group.step_down()
        self.scope.cancel()


class LeaderServices(ServedGroup):
    """A leader of one member, or of several as far as it knows (`FakeGroup.has_other_members`)."""

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root)
        self.root = root
        limits = {"timer_max_delay_sec": 3 * DAY_S, "max_message_size": 1 << 16}
        self.broker = Broker(self.group, **limits, **settings)
        self.broker.make_topic("T", 1)
        processors = self.broker.processors
        self.services = (
            ScheduleMessageService(
                self.group,
                self.clock,
                levels=len(LEVELS_MS),
                is_deleting=processors.topics.is_ending,
                real_queue=processors.topics.real_queue,
            ),
            TimerMessageService(
                self.group,
                self.clock,
                claims=processors.timer_claims,
                is_deleting=processors.topics.is_ending,
                real_queue=processors.topics.real_queue,
            ),
            TransactionCheckService(
                self.group,
                processors.topics,
                processors.transactions,
                CheckBack(processors.clients, self.broker.settings),
                BrokerTable(),
                StoreTable(),
                clock=self.clock,
            ),
        )

    def send(self, properties: str, body: bytes = b"body", **changes: Any) -> RemotingCommand:
        """Send one message to topic T as a client does, with request 10."""
        ext = {
            "producerGroup": "p", "topic": "T", "defaultTopic": "TBW102", "queueId": "0",
            "defaultTopicQueueNums": "4", "sysFlag": "0", "bornTimestamp": "1",
            "flag": "0", "properties": properties, "reconsumeTimes": "0", **changes,
        }  # fmt: skip
        return self.broker.call(RequestCode.SEND_MESSAGE, ext, body)

    def store(
        self,
        topic: str,
        properties: bytes,
        body: bytes = b"body",
        queue_id: int = 0,
        sys_flag: int = 0,
    ) -> int:
        """Store a record whatever processors would say; return its position."""
        record = encode_record(
            topic=topic, queue_id=queue_id, body=body, properties=properties, sys_flag=sys_flag
        )
        return self.put(topic, queue_id, [record])

    async def serve(self) -> None:
        """Run all services until cancelled; what one of them raises comes out."""
        await self.lead(*(service.run for service in self.services), self.settle_kicked)
