"""POP beside a model of what is out, while everything around it fails: storing, leading, answers.

Rounds of hostile steps, each followed by quiet: then nothing that could be handed out stays in a
queue for a second while a request waits for it. Time is virtual.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.broker_errors import PendingFullError
from dledger.commitlog.entry import Run
from dledger.commitlog.record import encode_record, iter_records
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import STALE_FIELD, decode_stale
from dledger.remoting.protocol.pop_requests import (
    BatchAck,
    BatchAckMessageRequestBody,
    PopMessageResponseHeader,
    ReceiptHandle,
)
from dledger.services import pop_decision
from dledger.state.pop import MAX_OUT, MAX_OUT_PER_QUEUE, PopKey
from dledger.state.state_record import SubscriptionGroupsChange, state_batch
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import VirtualClock
from tests.harness.broker import Broker
from tests.harness.extent import EXTENT
from tests.harness.fake_group import BROKER, FakeConnection, FakeGroup, batch_of

TOPICS = {"T": 2, "U": 1}
GROUPS = {"plain": "*", "tagged": "A", "ordered": "*"}
"""Consumer groups, and the tags they want."""
IN_ORDER = "ordered"
RETRIES = {"plain": 2, "tagged": 16, "ordered": 16}
TICK_S = 0.05
LATE_MS = 1_000
"""How much later than it could a message is handed out at the latest."""
SLACK_MS = 350
"""Two entries, the steps of time, and the next look after a limit."""


@dataclass(eq=False)
class Delivery:
    """A message as one answer had it; what a request of unknown outcome did makes it *vague*."""

    key: PopKey
    offset: int
    receipt: ReceiptHandle
    until_ms: int
    attempts: int
    is_acked: bool = False
    is_vague: bool = False


@dataclass(eq=False)
class Asked:
    """A request, and what it is about."""

    command: RemotingCommand
    connection: FakeConnection
    group: str
    topic: str
    queue_id: int = -1
    receipts: tuple[tuple[Delivery, ReceiptHandle], ...] = ()
    invisible_ms: int = 0
    at_ms: int = 0
    answers: list[RemotingCommand] = field(default_factory=list)


class Hostile:
    """Requests of many consumers to one broker, and the model of what they were answered."""

    def __init__(self, folder: Path, seed: int, most: int, most_of_queue: int) -> None:
        self.rng = random.Random(seed)
        self.most, self.most_of_queue = most, most_of_queue
        self.clock = VirtualClock()
        self.group = FakeGroup(folder, self.clock)
        self.broker = Broker(self.group, self.clock)
        self.pops = self.broker.processors.pops
        for topic, queues in TOPICS.items():
            self.broker.make_topic(topic, queues=queues)
        for name in GROUPS:
            self.broker.make_group(name)
        configs = tuple(
            SubscriptionGroupConfig(name, retry_max_times=times) for name, times in RETRIES.items()
        )
        self.group.propose(state_batch(SubscriptionGroupsChange(configs)), lambda _: None)
        self.group.settle()
        self.replies: list[tuple[RemotingCommand, RemotingCommand]] = []
        self.connections = [FakeConnection(replies=self.replies) for _ in range(3)]
        self.closed: list[FakeConnection] = []
        self.open: dict[int, Asked] = {}
        self.deliveries: dict[tuple[PopKey, int], list[Delivery]] = {}
        self.since: dict[PopKey, int] = {}
        self.tags: dict[tuple[str, int], list[bytes]] = {}
        self.delivered = 0

    @property
    def now_ms(self) -> int:
        return self.group.store_time_ms

    # ------------------------------------------------------------------------------ requests

    def ask(self, asked: Asked) -> None:
        asked.at_ms = self.now_ms
        self.open[id(asked.command)] = asked
        handled = self.broker.handle(asked.command, asked.connection)
        if isinstance(handled, RemotingCommand):
            self.answered(asked, handled)
        self.collect()

    def collect(self) -> None:
        while self.replies:
            command, answer = self.replies.pop(0)
            self.answered(self.open[id(command)], answer)

    def answered(self, asked: Asked, answer: RemotingCommand) -> None:
        asked.answers.append(answer)
        assert len(asked.answers) == 1, "answered twice"
        if asked.command.code == RequestCode.POP_MESSAGE:
            if answer.code == 0:
                self.got(asked, answer)
        elif asked.receipts:
            self.used(asked, answer)

    def got(self, asked: Asked, answer: RemotingCommand) -> None:
        header = PopMessageResponseHeader.decode(answer.ext)
        by_key: dict[PopKey, list[int]] = {}
        records = list(iter_records(bytes(answer.body)))
        assert records
        for record in records:
            key = (asked.group, asked.topic, record.queue_id)
            by_key.setdefault(key, []).append(record.queue_offset)
        if asked.group == IN_ORDER:
            for key, offsets in by_key.items():
                self.check_order(key, offsets, header.pop_time)
        for record in records:
            key = (asked.group, asked.topic, record.queue_id)
            assert asked.queue_id in (-1, record.queue_id)
            tag = self.tags[asked.topic, record.queue_id][record.queue_offset]
            assert GROUPS[asked.group] in ("*", tag.decode())
            before = self.deliveries.setdefault((key, record.queue_offset), [])
            attempts = record.reconsume_times + 1
            assert attempts <= RETRIES[asked.group] + 1
            for each in before:
                assert not each.is_acked, f"{key} {record.queue_offset} comes after its end"
                assert each.attempts < attempts
                assert each.until_ms <= header.pop_time, "it is out to two consumers"
            receipt = ReceiptHandle(
                record.queue_offset,
                header.pop_time,
                header.invisible_time,
                header.revive_qid,
                BROKER,
                record.queue_id,
                record.queue_offset,
            )
            until_ms = header.pop_time + asked.invisible_ms
            before.append(Delivery(key, record.queue_offset, receipt, until_ms, attempts))
            self.delivered += 1

    def check_order(self, key: PopKey, offsets: list[int], pop_time: int) -> None:
        assert offsets == sorted(offsets)
        for (other, offset), found in self.deliveries.items():
            newest = found[-1]
            if other == key and offset not in offsets and not (newest.is_acked or newest.is_vague):
                assert newest.until_ms <= pop_time, "two of a queue are out"
                assert offset > max(offsets), "one that came before was left"

    def used(self, asked: Asked, answer: RemotingCommand) -> None:
        count = len(asked.receipts)
        stale = frozenset[int]()
        if answer.code == ResponseCode.NO_MESSAGE:
            stale = frozenset([0])
            if asked.command.code == RequestCode.BATCH_ACK_MESSAGE:
                stale = decode_stale(answer.ext.get(STALE_FIELD), count)
        elif answer.code != 0:
            for delivery, _ in asked.receipts:
                self.blur(delivery, asked.invisible_ms, asked.at_ms)
            return
        for place, (delivery, receipt) in enumerate(asked.receipts):
            newest = self.deliveries[delivery.key, delivery.offset][-1]
            is_current = newest is delivery and receipt == delivery.receipt
            if place in stale:
                if is_current and not (delivery.is_acked or delivery.is_vague):
                    assert delivery.until_ms <= self.now_ms, "a receipt that stands is refused"
                continue
            assert is_current or newest.is_vague, "a receipt of before counts"
            assert not delivery.is_acked, "a message ends twice"
            if asked.invisible_ms:
                popped = int(answer.ext["popTime"])
                delivery.until_ms = popped + asked.invisible_ms
                delivery.receipt = ReceiptHandle(
                    receipt.offset,
                    popped,
                    asked.invisible_ms,
                    int(answer.ext["reviveQid"]),
                    BROKER,
                    receipt.queue_id,
                    receipt.offset,
                )
            else:
                delivery.is_acked = True

    def blur(self, delivery: Delivery, invisible_ms: int, at_ms: int) -> None:
        """Note that a receipt may have been used, and changed when its message comes again."""
        delivery.is_vague = True
        if invisible_ms:
            delivery.until_ms = min(delivery.until_ms, at_ms + invisible_ms)

    # ------------------------------------------------------------------------------ steps

    def step(self) -> None:
        steps = (
            (self.send, 12),
            (self.receive, 14),
            (self.notice, 3),
            (self.acknowledge, 10),
            (self.acknowledge_many, 4),
            (self.change, 5),
            (self.settle, 20),
            (self.group.append, 5),
            (self.refuse, 2),
            (self.hold_barriers, 2),
            (self.close_one, 1),
            (self.unknown, 1),
            (self.not_stored, 1),
            (self.new_term, 1),
        )
        (chosen,) = self.rng.choices([each for each, _ in steps], [weight for _, weight in steps])
        chosen()
        self.collect()

    def connection(self) -> FakeConnection:
        return self.rng.choice(self.connections)

    def send(self) -> None:
        if self.group.leadership is None or self.group.refuse is not None:
            return
        topic = self.rng.choice(list(TOPICS))
        self.store(topic, self.rng.randrange(TOPICS[topic]), self.rng.randint(1, 4))

    def store(self, topic: str, queue_id: int, count: int) -> None:
        self.group.append()
        tags = [self.rng.choice([b"A", b"B"]) for _ in range(count)]
        records = [
            encode_record(
                topic=topic, queue_id=queue_id, body=b"x", properties=b"TAGS\x01" + tag + b"\x02"
            )
            for tag in tags
        ]
        self.group.propose(batch_of(records, Run(topic, queue_id, count)), lambda _: None)
        self.group.append()
        self.tags.setdefault((topic, queue_id), []).extend(tags)

    def place(self) -> PopKey:
        """Return a group, a topic, and a queue of it or -1."""
        topic = self.rng.choice(list(TOPICS))
        queue_id = self.rng.choice([-1, -1, self.rng.randrange(TOPICS[topic])])
        return self.rng.choice(list(GROUPS)), topic, queue_id

    def receive(
        self, poll_ms: int | None = None, where: tuple[str, str, int] | None = None
    ) -> None:
        group, topic, queue_id = where or self.place()
        invisible_ms = self.rng.choice([20, 300, 1_000, 3_000])
        if poll_ms is None:
            poll_ms = self.rng.choice([0, 200, 2_000, 15_000])
        fields = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue_id,
            "maxMsgNums": self.rng.choice([1, 2, 8]),
            "invisibleTime": invisible_ms,
            "pollTime": poll_ms,
            "bornTime": 0,
            "initMode": 0,
            "order": "true" if group == IN_ORDER else "false",
            "expType": "TAG",
            "exp": GROUPS[group],
        }
        command = request(RequestCode.POP_MESSAGE, {k: str(v) for k, v in fields.items()})
        self.ask(
            Asked(command, self.connection(), group, topic, queue_id, invisible_ms=invisible_ms)
        )

    def notice(self) -> None:
        group, topic, queue_id = self.place()
        fields = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue_id,
            "pollTime": self.rng.choice([0, 2_000]),
            "bornTime": 0,
            "order": "true" if group == IN_ORDER else "false",
            "expType": "TAG",
            "exp": GROUPS[group],
        }
        command = request(RequestCode.NOTIFICATION, {k: str(v) for k, v in fields.items()})
        self.ask(Asked(command, self.connection(), group, topic, queue_id))

    def some(self) -> Delivery | None:
        if not self.deliveries:
            return None
        found = self.rng.choice(list(self.deliveries.values())[-12:])
        return self.rng.choice([found[-1], found[-1], self.rng.choice(found)])

    def acknowledge(self) -> None:
        if (delivery := self.some()) is not None:
            self.ask(self.settling(delivery, RequestCode.ACK_MESSAGE))

    def settling(self, delivery: Delivery, code: int, invisible_ms: int = 0) -> Asked:
        group, topic, queue_id = delivery.key
        fields = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue_id,
            "offset": delivery.offset,
            "extraInfo": delivery.receipt.encode(),
        }
        if invisible_ms:
            fields["invisibleTime"] = invisible_ms
        command = request(code, {k: str(v) for k, v in fields.items()})
        # Another request about it may be under way: the first of them that is stored counts.
        for other in self.open.values():
            if not other.answers and any(each is delivery for each, _ in other.receipts):
                self.blur(delivery, invisible_ms or other.invisible_ms, self.now_ms)
        receipts = ((delivery, delivery.receipt),)
        return Asked(
            command, self.connection(), group, topic, receipts=receipts, invisible_ms=invisible_ms
        )

    def acknowledge_many(self) -> None:
        chosen: dict[tuple[PopKey, int], Delivery] = {}
        for _ in range(self.rng.randint(1, 6)):
            if (delivery := self.some()) is not None:
                chosen[delivery.key, delivery.offset] = delivery
        if chosen:
            self.batch(list(chosen.values()))

    def batch(self, deliveries: list[Delivery]) -> None:
        parts = [self.settling(each, RequestCode.ACK_MESSAGE) for each in deliveries]
        items = [
            BatchAck(
                c=each.key[0],
                t=each.key[1],
                so=each.offset,
                q=each.key[2],
                rq=each.receipt.revive_queue_id,
                pt=each.receipt.pop_time_ms,
                b=BatchAck.encode_offsets(each.offset, [each.offset]),
            )
            for each in deliveries
        ]
        body = BatchAckMessageRequestBody(broker_name=BROKER, acks=items).encode()
        receipts = tuple(pair for part in parts for pair in part.receipts)
        command = request(RequestCode.BATCH_ACK_MESSAGE, {}, body)
        self.ask(Asked(command, self.connection(), "", "", receipts=receipts))

    def change(self) -> None:
        if (delivery := self.some()) is not None:
            ms = self.rng.choice([1, 100, 2_000])
            self.ask(self.settling(delivery, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ms))

    def settle(self) -> None:
        self.group.settle()

    def refuse(self) -> None:
        self.group.refuse = None if self.group.refuse else PendingFullError("full")

    def hold_barriers(self) -> None:
        self.group.barriers_pass = not self.group.barriers_pass
        if self.group.barriers_pass:
            self.group.pass_barriers()

    def close_one(self) -> None:
        connection = self.connections.pop(0)
        self.closed.append(connection)
        self.connections.append(FakeConnection(replies=self.replies))
        connection.close()

    def unknown(self) -> None:
        self.group.append()
        self.group.time_out()

    def not_stored(self) -> None:
        self.group.fail_waiting(PendingFullError("a hanging disk"))

    def new_term(self) -> None:
        if self.group.leadership is not None:
            self.group.step_down()
            self.pops.role_changed()
        else:
            self.lead()

    def lead(self) -> None:
        self.group.lead()
        self.pops.role_changed()

    # ------------------------------------------------------------------------------ quiet

    async def quiet(self, seconds: float) -> None:
        """Let nothing fail for a time: what can be handed out is, where a request waits."""
        self.group.refuse, self.group.barriers_pass = None, True
        self.group.pass_barriers()
        if self.group.leadership is None:
            self.lead()
        self.since.clear()
        for _ in range(round(seconds / TICK_S)):
            while self.group.waiting:
                self.group.settle()
            self.group.settle()
            self.collect()
            self.check_waiting()
            self.quiet_step()
            await trio.sleep(TICK_S)

    def quiet_step(self) -> None:
        draw = self.rng.random()
        if draw < 0.1:
            self.receive(15_000)
        elif draw < 0.2:
            self.acknowledge_many()
        elif draw < 0.25:
            self.send()

    def check_waiting(self) -> None:
        waiting: dict[PopKey, bool] = {}
        for asked in self.open.values():
            is_open = not asked.answers and asked.connection in self.connections
            if asked.command.code == RequestCode.POP_MESSAGE and is_open:
                queues = range(TOPICS[asked.topic]) if asked.queue_id < 0 else (asked.queue_id,)
                waiting |= {(asked.group, asked.topic, each): True for each in queues}
        total = sum(len(row.out) for row in self.group.state.pops.values())
        for key in self.keys():
            if key in waiting and self.is_available(key, total):
                late = self.now_ms - self.since.setdefault(key, self.now_ms)
                assert late <= LATE_MS + SLACK_MS, f"{key} has messages and none is handed out"
            else:
                self.since.pop(key, None)

    def keys(self) -> Iterator[PopKey]:
        for topic, queues in TOPICS.items():
            yield from ((group, topic, each) for group in GROUPS for each in range(queues))

    def is_available(self, key: PopKey, total: int) -> bool:
        """Return whether a receive would hand out a message of a queue."""
        row = self.group.state.pops.get(key)
        over = [each for each in row.out.values() if each.expires_ms <= self.now_ms] if row else []
        if row is not None and key[0] == IN_ORDER:
            return len(over) == len(row.out)
        if any(each.attempts <= RETRIES[key[0]] for each in over):
            return True
        first = row.next_offset if row else self.group.state.consumer_offset(*key) or 0
        tags = self.tags.get(key[1:], [])
        is_new = any(GROUPS[key[0]] in ("*", tag.decode()) for tag in tags[first:])
        out = len(row.out) if row else 0
        return is_new and out < self.most_of_queue and total < self.most

    async def finish(self) -> None:
        """Receive and acknowledge until all is done; every request is answered once."""
        await self.quiet(4)
        for _ in range(1_000):
            for key in self.rng.sample(list(self.keys()), len(list(self.keys()))):
                self.receive(200, key)
            for _ in range(3):
                while self.group.waiting:
                    self.group.settle()
                self.collect()
                left = [
                    found[-1]
                    for found in self.deliveries.values()
                    if not found[-1].is_acked and not found[-1].is_vague
                ]
                for each in left:
                    self.batch([each])
                vague = [found[-1] for found in self.deliveries.values() if found[-1].is_vague]
                for each in vague:
                    if each.receipt and not each.is_acked:
                        self.batch([each])
                self.group.settle()
            await trio.sleep(0.3)
            if self.is_done():
                break
        assert self.is_done(), "not all messages are done with"
        await trio.sleep(16)
        self.collect()
        for asked in self.open.values():
            assert asked.answers or asked.connection in self.closed, f"no answer to {asked}"
        assert not self.pops.held_count

    def is_done(self) -> bool:
        state = self.group.state
        return not state.pops and all(
            (state.consumer_offset(*key) or 0) == state.max_offset(*key[1:]) for key in self.keys()
        )


async def play(folder: Path, seed: int, rounds: int, patch: pytest.MonkeyPatch) -> int:
    """Play one seed; return how many messages were delivered."""
    rng = random.Random(-1 - seed)
    most, most_of_queue = rng.choice([6, 12, MAX_OUT]), rng.choice([2, 5, MAX_OUT_PER_QUEUE])
    patch.setattr(pop_decision, "MAX_OUT", most)
    patch.setattr(pop_decision, "MAX_OUT_PER_QUEUE", most_of_queue)
    patch.setattr(pop_decision, "MAX_MESSAGES_PER_ENTRY", rng.choice([1, 3, 1_000]))
    world = Hostile(folder, seed, most, most_of_queue)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.pops.run)
            nursery.start_soon(world.group.turns.run)
            for _ in range(rounds):
                for _ in range(rng.choice([10, 40])):
                    world.step()
                    await trio.sleep(rng.choice([0, 0, 0.001, 0.03, 0.2]))
                await world.quiet(rng.choice([0.5, 4]))
            await world.finish()
            nursery.cancel_scope.cancel()
    finally:
        world.group.close()
    return world.delivered


@pytest.mark.parametrize("seed", range(2 * EXTENT))
async def test_pop_hands_out_all_while_storing_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    seed: int,
) -> None:
    assert await play(tmp_path, seed, 3, monkeypatch)
