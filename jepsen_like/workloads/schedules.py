"""What clients do with repeated schedules: put, change, pause, resume, remove; and read what comes.

One client acts on a name, one step after the other; each step goes by one of two machines, whose
views of the cluster differ. After a step of unknown outcome the name is given up: it is removed,
whatever comes of that, and the next schedule has another one. A watcher reads each message as soon
as it is there, so that an early one is seen. When the run is over the list of schedules is read,
all are removed, and everything they sent is read once more.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.properties import SCHEDULE_DUE_MS, SCHEDULE_MISSED, SCHEDULE_NAME
from dledger.jepsen_like.checkers.schedules import MINUTE_MS, Act
from dledger.jepsen_like.history.operation import NOTHING, SCHEDULE_ABSENT, F, Operation, Outcome
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.workloads.output_topic import ASK_AGAIN_S, make_topic
from dledger.jepsen_like.workloads.recorder import Recorder
from dledger.jepsen_like.workloads.whole_queue import read_queue
from dledger.remoting.protocol.codes import ResponseCode

OUTPUT_SUFFIX: Final = "-schedules"
"""Ends the name of the topic that schedules send to."""
OUTPUT_QUEUES: Final = 2
GROUP: Final = "schedulers"
PAUSE_S: Final = 4.0
"""Mean time between two steps of a client, whatever the rate of others: instants are to come."""
REST: Final = 0.3
"""Share of the steps that are none: a schedule that lasts meets more faults."""
CRON: Final = 0.15
"""Share of the schedules that have a cron expression: each minute."""
INTERVALS_MS: Final = (1_000, 1_000, 2_000, 3_000, 7_000)
BEGINS: Final = 0.3
"""Share that begin at a time of their own."""
ENDS: Final = 0.1
BEGIN_S_MAX: Final = 5
END_S: Final = 20
END_MARGIN_S: Final = 15
"""A put is decided within this."""
ONE_QUEUE: Final = 0.5
NAME_AGAIN: Final = 0.5
"""Share of the certain removals after which the name is used again."""
OFF_MACHINE: Final = 0.4
"""Share of the steps that go by the other machine."""
REMOVALS_MAX: Final = 3
"""Tries to remove a schedule that is not certain: what stays sends until the end."""
WATCH_S: Final = 1.0
PULL_MESSAGES: Final = 32
SHARES: Final = (
    (Act.MESSAGE, 0.2),
    (Act.PUT, 0.3),
    (Act.AGAIN, 0.4),
    (Act.PAUSE, 0.8),
    (Act.REMOVE, 1.0),
)
"""Chance of each step, added up; a schedule that rests is resumed, most often."""


@dataclass(slots=True)
class _Schedule:
    """A schedule as its client knows it.

    Attributes:
        body: Its course and its newest put.
        step_ms: Between two instants.
        anchor_ms: One of them; `NOTHING` until a put is answered.
    """

    name: str
    course: int
    body: bytes
    expression: str
    step_ms: int
    queue_id: int
    begin_ms: int = 0
    end_ms: int = 0
    anchor_ms: int = NOTHING
    is_paused: bool = False


class Schedules:
    """The clients of repeated schedules of a run."""

    def __init__(self, clients: Recorder) -> None:
        self._clients = clients
        self.output = clients.topic + OUTPUT_SUFFIX
        self._other: ClientInstance | None = None
        """Of the machine of readers, while it runs."""

    async def make_topic(self, instance: ClientInstance) -> None:
        """Make the topic that schedules send to; return when clients know its queues."""
        await make_topic(self._clients, instance, self.output, OUTPUT_QUEUES)

    async def run(self, instance: ClientInstance, count: int) -> None:
        """Let *count* clients act until it is over."""
        async with trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(self._act, instance, index)

    # -- one client ------------------------------------------------------------------------

    async def _act(self, instance: ClientInstance, index: int) -> None:
        clients, rng = self._clients, self._clients.rng_of("scheduler", index)
        process, name = clients.new_process(), ""
        while not clients.is_over:
            schedule = _Schedule(name, NOTHING, b"", "", 0, NOTHING)
            with clients.acting():
                op = await self._put(instance, process, schedule, Act.PUT, rng)
            while op.outcome == Outcome.OK and op.status != Act.REMOVE:
                await clients.sleep(rng.expovariate(1 / PAUSE_S))
                if clients.is_over:
                    return
                if rng.random() < REST:
                    continue
                with clients.acting():
                    op = await self._step(instance, process, schedule, rng)
            name = schedule.name if op.outcome == Outcome.OK and rng.random() < NAME_AGAIN else ""
            if op.outcome != Outcome.OK:
                process = clients.new_process()
                with clients.acting():
                    await self._give_up(instance, process, schedule)
            await clients.sleep(rng.expovariate(1 / PAUSE_S))

    async def _step(
        self, instance: ClientInstance, process: int, schedule: _Schedule, rng: SimRng
    ) -> Operation:
        """Do something with a schedule."""
        chance = rng.random()
        act = next(act for act, up_to in SHARES if chance < up_to)
        if schedule.is_paused and act is not Act.REMOVE and rng.random() < 0.7:
            act = Act.RESUME
        if act in (Act.PUT, Act.MESSAGE, Act.AGAIN):
            ends_ms = instance.clock.wall_ms() + 1000 * END_MARGIN_S
            if schedule.end_ms and schedule.end_ms < ends_ms:
                act = Act.PUT  # with the same times it is refused: none comes any more
            return await self._put(instance, process, schedule, act, rng)
        if act is Act.PAUSE and schedule.is_paused:
            act = Act.RESUME
        admin = Admin(self._machine(instance, rng))
        op = self._begin(process, schedule, act)
        calls = {
            Act.PAUSE: admin.pause_schedule,
            Act.RESUME: admin.resume_schedule,
            Act.REMOVE: admin.delete_schedule,
        }
        await self._end(op, calls[act](schedule.name))
        schedule.is_paused = act is Act.PAUSE
        return op

    async def _give_up(self, instance: ClientInstance, process: int, schedule: _Schedule) -> None:
        for _ in range(REMOVALS_MAX):
            if self._clients.is_over:
                return
            op = self._begin(process, schedule, Act.REMOVE)
            await self._end(op, Admin(instance).delete_schedule(schedule.name))
            if op.outcome == Outcome.OK:
                return

    async def _put(
        self,
        instance: ClientInstance,
        process: int,
        schedule: _Schedule,
        act: Act,
        rng: SimRng,
    ) -> Operation:
        """Put a schedule, with new times, with another message, or as it is."""
        wall_ms = instance.clock.wall_ms()
        op = self._begin(process, schedule, act)
        op.due_ns = op.call_ns - wall_ms * 1_000_000
        if schedule.course == NOTHING:
            schedule.course = op.txn = op.op_id
            schedule.name = schedule.name or f"schedule-{op.op_id}"
            op.group = schedule.name
        if act is Act.PUT:
            _draw_times(schedule, wall_ms, rng)
        if act is not Act.AGAIN:
            schedule.body = b"%d %d" % (schedule.course, op.op_id)
            is_free = rng.random() >= ONE_QUEUE
            schedule.queue_id = NOTHING if is_free else rng.randrange(OUTPUT_QUEUES)
        op.topic, op.queue, op.off = self.output, schedule.queue_id, schedule.step_ms
        op.min_off, op.cnt = schedule.anchor_ms, int(bool(schedule.begin_ms))
        op.max_off = schedule.end_ms or NOTHING
        self._clients.written(op)
        admin = Admin(self._machine(instance, rng))
        message = Message(self.output, schedule.body, tags=f"t{schedule.course % 4}")
        async with _Answer(self._clients, op):
            put = await admin.put_schedule(
                schedule.name,
                schedule.expression,
                message,
                queue_id=schedule.queue_id,
                begin_ms=schedule.begin_ms,
                end_ms=schedule.end_ms,
                paused=schedule.is_paused,
                broker_name=self._clients.queues[0].broker_name,
            )
            # One that begins at a time of its own may have sent for that before it was answered.
            if act is Act.PUT and put.coming_ms and not schedule.begin_ms:
                schedule.anchor_ms = op.min_off = put.coming_ms[0]
        return op

    def _machine(self, instance: ClientInstance, rng: SimRng) -> ClientInstance:
        other = self._other
        return instance if other is None or rng.random() >= OFF_MACHINE else other

    def _begin(self, process: int, schedule: _Schedule, act: Act) -> Operation:
        op = self._clients.begin(process, F.SCHEDULE)
        op.topic, op.group, op.txn, op.status = self.output, schedule.name, schedule.course, act
        return op

    async def _end(self, op: Operation, call: Awaitable[object]) -> None:
        async with _Answer(self._clients, op):
            await call

    # -- what comes ------------------------------------------------------------------------

    async def watch(self, instance: ClientInstance) -> None:
        """Read each message as soon as it is there; steps may go by *instance* meanwhile."""
        self._other = instance
        try:
            async with trio.open_nursery() as nursery:
                for number in range(OUTPUT_QUEUES):
                    nursery.start_soon(self._watch, instance, number)
        finally:
            self._other = None

    async def _watch(self, instance: ClientInstance, number: int) -> None:
        clients, offset = self._clients, 0
        queue = MessageQueue(self.output, clients.queues[0].broker_name, number)
        consumer, process = PullConsumer(instance, GROUP), clients.new_process()
        while not clients.is_over:
            try:
                result = await consumer.pull(
                    queue, offset, max_messages=PULL_MESSAGES, timeout_s=WATCH_S
                )
            except ClientError:
                await clients.sleep(ASK_AGAIN_S)  # there is no leader, or not yet the topic
                continue
            offset = max(offset, result.next_begin_offset)
            for message in result.messages:
                self._found(process, queue, message)

    def _found(self, process: int, queue: MessageQueue, message: MessageExt) -> None:
        op = self._clients.begin(process, F.FIRED, queue)
        name, due = message.properties.get(SCHEDULE_NAME, ""), SCHEDULE_DUE_MS
        op.group, op.min_off = name or "?", int(message.properties.get(due, NOTHING))
        op.cnt = int(message.properties.get(SCHEDULE_MISSED, 0))
        op.max_off = message.born_timestamp_ms
        op.off, op.txn = message.queue_offset, int(bytes(message.body).split()[1])
        self._clients.end(op)

    # -- the end ---------------------------------------------------------------------------

    async def drain(self, instance: ClientInstance) -> None:
        """Read which schedules there are, remove them, and read all they sent.

        Raises:
            ClientError: A request was refused.
        """
        clients, process, admin = self._clients, self._clients.new_process(), Admin(instance)
        end = clients.begin(process, F.SCHEDULE)
        end.status = Act.LISTED
        infos = [info for every in (await admin.schedules()).values() for info in every]
        clients.end(end)
        for info in infos:
            op = clients.begin(process, F.SCHEDULE)
            op.group, op.status, op.queue = info.name, Act.LISTED, int(info.paused)
            op.cnt, op.max_off = info.fired, info.last_ms
            clients.end(op)
            await admin.delete_schedule(info.name)
        consumer, is_whole = PullConsumer(instance, GROUP), True
        for number in range(OUTPUT_QUEUES):
            queue = MessageQueue(self.output, clients.queues[0].broker_name, number)
            note = partial(self._found, process, queue)
            is_whole = await read_queue(consumer, queue, note) == 0 and is_whole
        op = clients.begin(process, F.FIRED)
        op.cnt = int(is_whole)
        clients.end(op)


def _draw_times(schedule: _Schedule, wall_ms: int, rng: SimRng) -> None:
    """Give a schedule new times."""
    schedule.begin_ms, schedule.end_ms, schedule.anchor_ms = 0, 0, NOTHING
    if rng.random() < CRON and schedule.step_ms != MINUTE_MS:
        schedule.expression, schedule.step_ms = "* * * * *", MINUTE_MS
        return
    # Times that differ in any case: what is put again as it was, counts on.
    others = [ms for ms in INTERVALS_MS if ms != schedule.step_ms]
    schedule.step_ms = rng.choice(others)
    schedule.expression = f"@every {schedule.step_ms // 1000}s"
    if rng.random() < BEGINS:
        schedule.begin_ms = schedule.anchor_ms = wall_ms + rng.randint(0, 1000 * BEGIN_S_MAX)
    if rng.random() < ENDS:
        schedule.end_ms = wall_ms + 1000 * (BEGIN_S_MAX + rng.randint(2, END_S))


class _Answer:
    """Completes the row of a step by how its call ends.

    Calls are repeated where an answer was lost, and what an earlier attempt may have done a later
    refusal does not undo: all but a plain answer is unknown.
    """

    def __init__(self, clients: Recorder, op: Operation) -> None:
        self._clients = clients
        self._op = op

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> bool:
        clients, op = self._clients, self._op
        if error is None:
            clients.end(op)
            return False
        if not isinstance(error, ClientError):
            return False
        code = error.code if isinstance(error, RequestFailedError) else None
        if code == ResponseCode.QUERY_NOT_FOUND:
            if op.status == Act.REMOVE:
                clients.end(op)  # it may have been this call's earlier attempt
            else:
                clients.refused(op, SCHEDULE_ABSENT)
        elif isinstance(error, (NoRouteError, NoNameServerError)):
            clients.failed(op, error)  # no group was asked
        else:
            clients.unknown(op, type(error).__name__)
        return True
