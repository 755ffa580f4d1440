"""Delays, timers and transactions together, beside a model of what was answered.

Rounds of hostile steps, each followed by quiet: then each message that was answered as stored is in
its topic once and was not early, and what was recalled or rolled back is nowhere. Time is virtual.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from dledger.broker_errors import PendingFullError
from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import Record, decode_record
from dledger.group_api import QueueTouched
from dledger.processors.client_table import Client
from dledger.processors.transactions import CheckBack
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import RecallHandle
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.topic_names import (
    HALF_TOPIC,
    SET_ASIDE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import TimerMessageService
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings.tables import BrokerTable, StoreTable
from tests.harness.broker import LEVELS_MS, Broker
from tests.harness.deferred_model import Message
from tests.harness.fake_group import BROKER, FakeConnection
from tests.harness.half_messages import COMMIT, ROLLBACK, UNDECIDED, Half, end_ext
from tests.harness.leader_services import ServedGroup

CODE = RequestCode
LEVELS = (1, 2, 3)
TOPICS = {"T": 2, "U": 1}
"""U is removed and made again."""
QUIET_S = 240
"""All delays, timers and checks are over."""


RULES = BrokerTable(
    transaction_timeout_ms=2000, transaction_check_interval_ms=5000, transaction_check_max=3
)


class Deferred:
    """Requests to one broker, its services, and the model of what they were answered."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = ServedGroup(folder, segment_bytes=8 << 20)
        self.group, self.clock = self.world.group, self.world.clock
        self.messages: dict[bytes, Message] = {}
        self.open: dict[int, tuple[RemotingCommand, Callable[[RemotingCommand], None]]] = {}
        self.replies: list[tuple[RemotingCommand, RemotingCommand]] = []
        self.dates: list[tuple[float, int]] = []
        """When the date was set back, and what it was before."""
        self.there: dict[tuple[str, int], list[bytes]] = {}
        self.deleted = Counter[str]()
        """How often a topic was removed: which of its name it is."""
        self.removals: list[list[str]] = []
        """Outcomes, empty without one, of removals of topic U that are not applied."""
        self.is_late = False
        self.is_damaged = False
        self.pause_s = 0.02
        self.entry_bytes_max = self.rng.choice([500, 2000, 1 << 23])
        self.group.answers_early = self.rng.random() < 0.2
        self.group.on_applied.append(self.applied)
        self.restart()
        for topic, queues in TOPICS.items():
            self.broker.make_topic(topic, queues)

    # -- around it -------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin with new processors and services, as a node does that starts."""
        self.broker = Broker(self.group, timer_max_delay_sec=3600)
        processors = self.broker.processors
        self.register()
        topics = processors.topics
        self.services = (
            ScheduleMessageService(
                self.group,
                self.clock,
                levels=len(LEVELS_MS),
                is_deleting=topics.is_ending,
                real_queue=topics.real_queue,
                entry_bytes_max=self.entry_bytes_max,
            ),
            TimerMessageService(
                self.group,
                self.clock,
                claims=processors.timer_claims,
                is_deleting=topics.is_ending,
                real_queue=topics.real_queue,
                entry_bytes_max=self.entry_bytes_max,
                roll_window_ms=20_000,
            ),
            TransactionCheckService(
                self.group,
                topics,
                processors.transactions,
                CheckBack(processors.clients, self.broker.settings),
                RULES,
                StoreTable(file_reserved_time=1),
                clock=self.clock,
            ),
        )
        self.scopes: dict[str, trio.CancelScope] = {}

    def register(self) -> None:
        """Let a producer connect."""
        self.connection = FakeConnection(replies=self.replies)
        client: Client[Any] = Client(self.connection, "c", "", "JAVA", 407)
        self.broker.processors.clients.register_producer("pg", client)

    async def serve(self) -> None:
        """Run the services in each leadership; what one of them raises comes out."""
        while True:
            if self.group.leadership is not None:
                await self.world.lead(*(self.keeper(each) for each in self.services))
            await trio.sleep(0.05)

    def keeper(self, service: Any) -> Callable[[], Awaitable[None]]:
        """Return what runs a service again that was broken off, as after an error."""

        async def keep() -> None:
            term = self.group.term
            while True:
                self.scopes[service.name] = scope = trio.CancelScope()
                with scope:
                    await service.run()
                leadership = self.group.leadership
                if not scope.cancelled_caught:
                    assert leadership is None or leadership.term != term, "a service ended"
                    return
                await trio.sleep(self.rng.choice([0, 1]))

        return keep

    async def pump(self) -> None:
        """What is proposed becomes an entry soon."""
        while True:
            await trio.sleep(self.pause_s)
            self.settle()

    def settle(self) -> None:
        self.group.append()
        if not self.group.stalled:
            self.group.apply()
            if self.is_late:
                self.is_late, self.group.refuse = False, None
        self.collect()

    def applied(self, _touched: Sequence[QueueTouched]) -> None:
        """Take in what the newest entry put into topics."""
        applied = self.group.applied[-1]
        for item in applied.units:
            if item.topic in (*TOPICS, TRANS_CHECK_MAX_TIME_TOPIC):
                for position in item.units["phy_offset"].tolist():
                    record = decode_record(bytes(self.group.log.record_at(position)))
                    self.stored(record, item.topic)
                    self.there.setdefault((item.topic, item.queue_id), []).append(
                        bytes(record.body)
                    )
            if item.topic in (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, SET_ASIDE_TOPIC):
                for position in item.units["phy_offset"].tolist():
                    record = decode_record(bytes(self.group.log.record_at(position)))
                    self.waits(record, item.topic)
        for topic in applied.deleted_topics:
            self.deleted[topic] += 1
            self.there = {key: found for key, found in self.there.items() if key[0] != topic}
            self.removals.pop(0)

    def waits(self, record: Record, topic: str) -> None:
        message = self.messages.get(bytes(record.body))
        if message is None:
            return  # the note of a recall
        if topic == SET_ASIDE_TOPIC:
            assert message.incarnation != self.deleted[message.topic], f"{message} is set aside"
            message.set_aside += 1
        if topic == SCHEDULE_TOPIC:
            # It counts from when it is stored, by the date of then.
            message.due_ms = record.store_timestamp_ms + message.delay_ms
        if message.incarnation is None:
            message.incarnation = self.deleted[message.topic]

    def stored(self, record: Record, topic: str) -> None:
        message = self.messages[bytes(record.body)]
        if topic == message.topic:
            assert message.incarnation in (None, self.deleted[topic]), f"{message} is for another"
        if topic == TRANS_CHECK_MAX_TIME_TOPIC:
            message.given_up += 1
        else:
            passed_ms = (self.clock.monotonic() - message.sent_s) * 1000
            message.arrives(record, passed_ms, self.latest_ms(message.sent_s))

    def latest_ms(self, since_s: float) -> int:
        """Return the latest date that the clock had since."""
        return max([self.clock.wall_ms(), *(ms for at_s, ms in self.dates if at_s >= since_s)])

    # -- requests --------------------------------------------------------------------------

    def ask(
        self,
        code: RequestCode,
        ext: dict[str, Any],
        then: Callable[[RemotingCommand], None],
        body: bytes = b"",
    ) -> bool:
        """Let the broker handle a request; return whether the answer comes later."""
        command = request(code, {key: str(value) for key, value in ext.items()}, body)
        handled = self.broker.handle(command, self.connection)
        if isinstance(handled, RemotingCommand):
            then(handled)
            return False
        self.open[id(command)] = command, then
        return True

    def collect(self) -> None:
        while self.replies:
            command, answer = self.replies.pop(0)
            _, then = self.open.pop(id(command))
            then(answer)

    def send(self, kind: str, properties: str, **known: Any) -> None:
        topic = self.rng.choice(list(TOPICS))
        message = Message(topic, kind, self.clock.monotonic(), **known)
        body = b"%s %d" % (kind.encode(), len(self.messages))
        self.messages[body] = message
        ext = {
            "producerGroup": "pg", "topic": topic, "defaultTopic": "TBW102",
            "queueId": self.rng.randrange(TOPICS[topic]), "defaultTopicQueueNums": "1",
            "sysFlag": "0", "bornTimestamp": "1", "flag": "0", "reconsumeTimes": "0",
            "properties": f"UNIQ_KEY\x01K{len(self.messages)}\x02{properties}",
        }  # fmt: skip

        def answered(answer: RemotingCommand) -> None:
            message.outcome = "stored" if answer.code == 0 else str(outcome_of(answer))
            message.handle = answer.ext.get("recallHandle", "")
            if kind == "half" and answer.code == 0:
                position = int(answer.ext["msgId"][16:], 16)
                message.half = Half(int(answer.ext["queueOffset"]), position)

        is_proposed = self.ask(CODE.SEND_MESSAGE, ext, answered, body)
        if topic == "U" and kind == "plain" and is_proposed:
            assert not self.removals, "it is stored in a topic that is being removed"

    def plain(self) -> None:
        self.send("plain", "")

    def delayed(self) -> None:
        level = self.rng.choice(LEVELS)
        self.send("level", f"DELAY\x01{level}\x02", delay_ms=LEVELS_MS[level - 1])

    def timed(self) -> None:
        due_ms = self.clock.wall_ms() + self.rng.choice([1, 900, 3000, 3000, 25_000, 60_000])
        self.send("timer", f"TIMER_DELIVER_MS\x01{due_ms}\x02", due_ms=due_ms)

    def half(self) -> None:
        immunity = self.rng.choice(["", "", "CHECK_IMMUNITY_TIME_IN_SECONDS\x018\x02"])
        self.send("half", f"TRAN_MSG\x01true\x02PGROUP\x01pg\x02{immunity}")

    def some(self, wanted: Callable[[Message], bool]) -> Message | None:
        found = [each for each in self.messages.values() if wanted(each)][-12:]
        return self.rng.choice(found) if found else None

    def recall(self) -> None:
        message = self.some(lambda each: bool(each.handle))
        if message is None:
            return
        assert RecallHandle.decode(message.handle).broker_name == BROKER

        def answered(answer: RemotingCommand) -> None:
            if answer.code == 0:
                assert not message.copies, f"{message} is recalled and there"
                assert not message.was_too_late
                message.is_recalled = True
            elif answer.code == 604:
                assert not message.is_recalled, f"{message} was recalled"
                message.was_too_late = True
            elif outcome_of(answer) == "unknown":
                message.is_vague = True

        ext = {"topic": message.topic, "recallHandle": message.handle}
        self.ask(CODE.RECALL_MESSAGE, ext, answered)

    def end(self) -> None:
        message = self.some(lambda each: each.half is not None)
        if message is None or message.half is None:
            return
        decision = self.rng.choice([COMMIT, COMMIT, ROLLBACK, UNDECIDED])
        message.asked.add(decision)

        def answered(answer: RemotingCommand) -> None:
            if answer.code == 0 and decision != UNDECIDED:
                message.decisions.add(decision)
                assert len(message.decisions) == 1, f"{message} is decided twice"

        is_checked = self.rng.choice(["true", "false"])
        ext = end_ext(message.half, decision, fromTransactionCheck=is_checked)
        self.ask(CODE.END_TRANSACTION, ext, answered)

    def remove_topic(self) -> None:
        outcome: list[str] = []

        def answered(answer: RemotingCommand) -> None:
            outcome.append("stored" if answer.code == 0 else str(outcome_of(answer)))
            if outcome == ["not_stored"] and outcome in self.removals:
                self.removals = [each for each in self.removals if each is not outcome]

        if self.ask(CODE.DELETE_TOPIC_IN_BROKER, {"topic": "U"}, answered):
            self.removals.append(outcome)

    def make_topic(self) -> None:
        ext = {
            "topic": "U", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1,
            "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
        }  # fmt: skip
        self.ask(CODE.UPDATE_AND_CREATE_TOPIC, ext, lambda _: None)

    def remake_topic(self) -> None:
        """Remove the topic, make it again, and go on with it, all at once."""
        for request_of in (self.remove_topic, self.make_topic, self.plain, self.plain):
            request_of()
            if self.rng.random() < 0.5:
                self.group.append()

    # -- what fails ------------------------------------------------------------------------

    def refuse(self) -> None:
        if not self.is_late:
            full = PendingFullError("full")
            self.group.refuse = None if self.group.refuse is not None else full

    def stall(self) -> None:
        self.group.stalled = not self.group.stalled

    def unknown(self) -> None:
        """Let waits end; nothing more is taken before what is late is applied."""
        self.group.append()
        if self.group.log.last_index > self.group.state.applied_index:
            self.is_late, self.group.refuse = True, PendingFullError("late")
            self.group.time_out()

    def not_stored(self) -> None:
        self.group.fail_waiting(DiskFullError("full"))

    def set_date(self) -> None:
        if self.rng.random() < 0.5:
            self.dates.append((self.clock.monotonic(), self.clock.wall_ms()))
            self.clock.skew_ms -= self.rng.choice([500, 7000])
        else:
            self.clock.skew_ms += self.rng.choice([500, 7000])

    def damage(self) -> None:
        """Let no record be read, or again."""
        self.is_damaged = not self.is_damaged

    def leave(self) -> None:
        """End the connection of the only producer."""
        connection: Any = self.connection
        self.broker.processors.clients.close_channel(connection)

    def set_rules(self) -> None:
        """Change settings while check-back runs."""
        checks = self.services[2]
        assert isinstance(checks, TransactionCheckService)
        interval_ms, most = self.rng.choice([300, 5000]), self.rng.randint(1, 4)
        checks.settings = replace(
            RULES, transaction_check_interval_ms=interval_ms, transaction_check_max=most
        )

    def many(self) -> None:
        """Send many at once."""
        for _ in range(self.rng.choice([5, 40])):
            self.rng.choice([self.delayed, self.timed, self.half])()

    def break_off(self) -> None:
        if self.scopes:
            self.rng.choice(list(self.scopes.values())).cancel()

    def depose(self) -> None:
        if self.group.leadership is not None:
            self.world.depose()
        elif self.rng.random() < 0.7:
            self.lead()

    def lead(self) -> None:
        self.lift()
        if self.rng.random() < 0.3 and not self.group.answers_early:
            self.group.log.truncate_from(self.group.state.applied_index + 1)
        if self.rng.random() < 0.3:
            self.restart()
        self.group.lead()
        self.is_late, self.group.refuse = False, None
        self.removals.clear()

    def lift(self) -> None:
        """Let what stalls go on."""
        self.group.stalled = self.is_damaged = False
        if not self.is_late:
            self.group.refuse = None

    def step(self) -> None:
        steps = (
            (self.plain, 6), (self.delayed, 8), (self.timed, 8), (self.half, 8),
            (self.recall, 5), (self.end, 14),
            (self.remove_topic, 3), (self.make_topic, 5), (self.remake_topic, 2),
            (self.group.append, 6), (self.settle, 6), (self.refuse, 2), (self.stall, 3),
            (self.unknown, 2), (self.not_stored, 2), (self.set_date, 1), (self.break_off, 2),
            (self.depose, 1), (self.damage, 1), (self.leave, 1), (self.register, 2),
            (self.set_rules, 1), (self.many, 1),
        )  # fmt: skip
        (chosen,) = self.rng.choices([each for each, _ in steps], [weight for _, weight in steps])
        chosen()
        self.collect()
        if self.rng.random() < 0.1:
            self.lift()
        if self.rng.random() < 0.1 and self.group.leadership is None:
            self.lead()

    # -- quiet -----------------------------------------------------------------------------

    async def quiet(self) -> None:
        """Let nothing fail until all is over, and compare."""
        if self.group.leadership is None:
            self.lead()
        self.lift()
        self.settle()
        self.lift()
        self.make_topic()
        self.register()
        self.pause_s = 0.5
        await trio.sleep(QUIET_S)
        self.pause_s = 0.02
        self.settle()
        assert not self.open, "a request is not answered"
        state = self.group.state
        assert not len(state.timers)
        assert not state.transactions.open
        for level in LEVELS:
            at = state.delay_progress.get(level, 0)
            assert at == state.max_offset(SCHEDULE_TOPIC, level - 1)
        for message in self.messages.values():
            message.check()
        for (topic, queue_id), bodies in self.there.items():
            assert self.world.bodies(topic, queue_id) == bodies
