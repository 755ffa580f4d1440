"""The proxy's calls beside a model, between clients that end anywhere and brokers that fail.

Clients send, receive, acknowledge, change times and forward, and end in the middle; brokers lose
answers, refuse, change leaders. What a call states is compared with what brokers hold at the end,
when all is quiet: then nothing is held for any client, and every message that was not acknowledged
comes. Time is virtual.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from dledger.aio.guest import Guest
from dledger.commitlog.record import decode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.messages import duration, timestamp
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.sends import TransactionId
from dledger.proxy.server import _Handlers
from dledger.proxy.service import MessagingService
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from tests.harness.extent import EXTENT
from tests.harness.pop_group import Fault, PopGroup
from tests.harness.pop_table import Key
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.dledger.proxy.grpc_doubles import TrioCall, TrioGuest

TOPIC: Final = pb.Resource(name="T")
GROUP: Final = pb.Resource(name="clerks")
QUEUE: Final = pb.MessageQueue(topic=TOPIC, broker=pb.Broker(name="g"))

UNKNOWN: Final = frozenset({pb.PROXY_TIMEOUT, pb.INTERNAL_ERROR, 0})
"""Codes after which it may be done or not; 0: the client has ended the call."""

HOSTILE_S: Final = 40.0
LONGEST_S: Final = 600
"""Invisible time of what no test waits for: it comes again sooner, or it was lost."""

CODES: Final = (
    RequestCode.SEND_RECORDS,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.END_TRANSACTION,
)
COMMIT: Final = 8
ROLLBACK: Final = 12
"""As brokers are asked for them."""


@dataclass
class Ledger:
    """What calls stated."""

    sends: dict[bytes, int] = field(default_factory=dict)
    settled: dict[Key, dict[int, int]] = field(default_factory=dict)
    forwarded: dict[Key, dict[int, int]] = field(default_factory=dict)
    """By message the code of each call that would end it, 0 until it is answered."""
    decided: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By the place of a half message what was asked for, and the code."""
    ended: set[str] = field(default_factory=set)
    """Receives whose client did not get the whole answer."""

    def note(self, key: Key, number: int, code: int, *, is_forward: bool = False) -> None:
        """Note what a call stated."""
        self.settled.setdefault(key, {})[number] = code
        if is_forward:
            self.forwarded.setdefault(key, {})[number] = code


@dataclass
class Clients:
    """Clients of one proxy, and what they were answered."""

    handlers: _Handlers
    rng: random.Random
    is_calm: bool
    ledger: Ledger = field(default_factory=Ledger)
    _serial: int = 0

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    async def call(self, name: str, request: Any, client_id: str = "c") -> Any:
        """Make a call of one answer; None: its client has ended it."""
        rng = self.rng
        call = TrioCall(client_id, time_left_s=rng.choice([None, 0.3, 2.0, 8.0]))
        handler = self.handlers.handle(name)
        if rng.random() < 0.9:
            return await call.make(handler, request)
        with trio.move_on_after(rng.choice([0.0, 0.01, 1.0])):
            return await call.make(handler, request)
        return None

    # ------------------------------------------------------------------------------ sends

    async def produce(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([0.05, 0.5, 2.0, 5.0]))
            kind = self.rng.choice([pb.NORMAL, pb.NORMAL, pb.FIFO, pb.DELAY])
            messages = [self._message(kind) for _ in range(self.rng.choice([1, 1, 2, 5]))]
            self.ledger.sends.update({each.body: 0 for each in messages})
            answer = await self.call("SendMessage", pb.SendMessageRequest(messages=messages))
            for place, message in enumerate(messages):
                if answer is None:
                    code = 0
                elif place < len(answer.entries):
                    code = answer.entries[place].status.code
                else:
                    code = answer.status.code
                self.ledger.sends[message.body] = code

    async def transact(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([0.5, 2.0, 5.0]))
            message = self._message(pb.TRANSACTION)
            self.ledger.sends[message.body] = 0
            answer = await self.call("SendMessage", pb.SendMessageRequest(messages=[message]))
            if answer is None:
                continue
            self.ledger.sends[message.body] = answer.status.code
            if answer.status.code == pb.OK:
                transaction_id = answer.entries[0].transaction_id
                for _ in range(self.rng.choice([0, 1, 2, 3])):
                    await self.decide(message, transaction_id)

    async def decide(self, message: pb.Message, transaction_id: str) -> None:
        place = TransactionId.decode(transaction_id).position
        resolution, wanted = self.rng.choice([(pb.COMMIT, COMMIT), (pb.ROLLBACK, ROLLBACK)])
        asked = pb.EndTransactionRequest(
            topic=TOPIC,
            message_id=message.system_properties.message_id,
            transaction_id=transaction_id,
            resolution=resolution,
        )
        calls = self.ledger.decided.setdefault(place, [])
        calls.append((wanted, 0))
        answer = await self.call("EndTransaction", asked)
        if answer is not None:
            calls[-1] = wanted, answer.status.code

    def _message(self, kind: pb.MessageType) -> pb.Message:
        number = self.serial()
        message = pb.Message(topic=TOPIC, body=b"m%d" % number)
        system = message.system_properties
        system.message_id, system.message_type = f"{number:032X}", kind
        if kind == pb.FIFO:
            system.message_group = "one"
        if kind == pb.DELAY:
            system.delivery_timestamp.CopyFrom(timestamp(1))
        return message

    # ------------------------------------------------------------------------------ receives

    async def consume(self, client_id: str) -> None:
        while True:
            for message in await self.receive(client_id):
                await self._work(client_id, message)

    async def receive(
        self, client_id: str, *, is_steady: bool = False
    ) -> Sequence[pb.SystemProperties]:
        """Receive as one does whose connection may break; return what came whole."""
        rng = self.rng
        attempt_id = f"a{self.serial()}"
        asked = pb.ReceiveMessageRequest(
            group=GROUP,
            message_queue=QUEUE,
            attempt_id=attempt_id,
            batch_size=rng.choice([1, 3, 32]),
            long_polling_timeout=duration(rng.choice([0, 500, 5_000, 20_000])),
        )
        if rng.random() < 0.3 and not is_steady:
            asked.auto_renew = True
        else:
            asked.invisible_duration.CopyFrom(duration(LONGEST_S * 1000))
        call = TrioCall(
            client_id,
            time_left_s=None if is_steady else rng.choice([None, 0.4, 3.0, 26.0]),
            ends_at=rng.choice([None, None, None, 0, 1, 2]) if not is_steady else None,
            read_s=rng.choice([0.0, 0.0, 0.05, 1.0]),
        )
        ends_s = float("inf")
        if rng.random() < 0.3 and not is_steady:
            ends_s = rng.choice([0.0, 0.001, 0.1, 2.0])
        with trio.move_on_after(ends_s):
            await call.make(self.handlers.handle("ReceiveMessage"), asked)
        if not call.is_whole:
            self.ledger.ended.add(attempt_id)
            return []
        if not is_steady:
            codes = [each.status.code for each in call.written if each.HasField("status")]
            assert len(codes) == 1, call.written
        return [each.message.system_properties for each in call.written if each.HasField("message")]

    async def _work(self, client_id: str, message: pb.SystemProperties) -> None:
        rng, key = self.rng, (message.queue_id, message.queue_offset)
        shown: dict[str, Any] = {
            "group": GROUP,
            "topic": TOPIC,
            "receipt_handle": message.receipt_handle,
        }
        for _ in range(rng.choice([0, 0, 1, 5])):
            await trio.sleep(rng.choice([1.0, 9.0]))
            await self.call(
                "Heartbeat", pb.HeartbeatRequest(client_type=pb.SIMPLE_CONSUMER), client_id
            )
        if rng.random() < 0.15:
            asked = pb.ChangeInvisibleDurationRequest(**shown, invisible_duration=duration(2_000))
            changed = await self.call("ChangeInvisibleDuration", asked, client_id)
            if changed is not None and changed.status.code == pb.OK:
                shown["receipt_handle"] = changed.receipt_handle
        if rng.random() < 0.1:
            forward = pb.ForwardMessageToDeadLetterQueueRequest(**shown, max_delivery_attempts=3)
            number = self.serial()
            self.ledger.note(key, number, 0, is_forward=True)
            answer = await self.call("ForwardMessageToDeadLetterQueue", forward, client_id)
            if answer is not None:
                self.ledger.note(key, number, answer.status.code, is_forward=True)
        elif rng.random() < 0.9:
            entry = pb.AckMessageEntry(receipt_handle=shown["receipt_handle"])
            entries = [entry] * rng.choice([1, 1, 1, 2])
            await self.ack(client_id, key, entries)

    async def ack(self, client_id: str, key: Key, entries: list[pb.AckMessageEntry]) -> None:
        asked = pb.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)
        numbers = [self.serial() for _ in entries]
        for number in numbers:
            self.ledger.note(key, number, 0)
        answer = await self.call("AckMessage", asked, client_id)
        if answer is not None:
            codes = [each.status.code for each in answer.entries]
            for place, number in enumerate(numbers):
                self.ledger.note(key, number, codes[place] if codes else answer.status.code)


@dataclass
class Weather:
    """How brokers answer."""

    world: World
    pops: PopGroup
    rng: random.Random
    is_calm: bool
    worst: float = 0.0

    def fault(self, asked: RemotingCommand) -> Fault:
        if self.is_calm or self.rng.random() >= self.worst or asked.code not in CODES:
            return Fault.NONE
        return self.rng.choice(list(Fault))

    async def blow(self) -> None:
        group = self.world.group
        while True:
            self.worst = self.rng.choice([0.0, 0.1, 0.5, 1.0])
            self.pops.late_s = self.rng.choice([0.1, 2.5, 6.0])
            await trio.sleep(self.rng.choice([1.0, 5.0, 15.0]))
            if not self.is_calm and self.rng.random() < 0.3:
                group.leader = None
                group.register()
                await trio.sleep(self.rng.choice([0.5, 5.0]))
                group.elect(self.rng.randrange(3))
                self.pops.move()
            if not self.is_calm and self.rng.random() < 0.2:
                broker = self.rng.choice(group.brokers)
                await broker.kill()
                with trio.CancelScope(shield=True):
                    await trio.sleep(self.rng.choice([0.1, 4.0]))
                    await broker.start()


async def hostile_run(seed: int) -> None:
    rng = random.Random(seed)
    is_calm = seed % 3 == 0
    async with open_world() as world, trio.open_nursery() as background:
        world.group.names_stale = rng.random() < 0.5
        pops = PopGroup(world.group, retries=100_000)
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        async with service.open():
            guest = cast(Guest, TrioGuest(background))
            handlers = _Handlers(service, guest, CallMetrics(service.clock))
            clients = Clients(handlers, rng, is_calm)
            weather = Weather(world, pops, rng, is_calm)
            pops.fault = weather.fault
            with trio.move_on_after(HOSTILE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(weather.blow)
                    for _ in range(rng.choice([1, 4])):
                        nursery.start_soon(clients.produce)
                    nursery.start_soon(clients.transact)
                    for number in range(rng.choice([1, 5, 20])):
                        nursery.start_soon(clients.consume, f"c{number}")
            await quiet(clients, weather)
            await drain(clients, pops)
            judge(world, clients.ledger, pops)
        background.cancel_scope.cancel()


async def quiet(clients: Clients, weather: Weather) -> None:
    """Let all faults and all clients end; nothing is held then."""
    weather.worst = 0.0
    group, service = weather.world.group, clients.handlers._service
    if group.leader is None:
        group.elect(0)
    weather.pops.move()
    await trio.sleep(90)
    if weather.is_calm:
        left = [
            key
            for key, out in weather.pops.out.items()
            if out.attempt_id in clients.ledger.ended and out.ends_s > trio.current_time()
        ]
        assert left == [], "out for clients that have ended"
    await trio.sleep(100)
    assert clients.handlers._unread.used_bytes == 0
    assert clients.handlers._requests.used_bytes == 0
    assert not clients.handlers._unread._by_host
    assert not clients.handlers._requests._by_host
    assert service._open_receives.left == 0
    assert len(service._renewals.table) == 0
    assert all(lines.is_idle for lines in service._receives._ack_lines.values())


async def drain(clients: Clients, pops: PopGroup) -> None:
    """Acknowledge all that comes until the longest time is over."""
    until_s = trio.current_time() + LONGEST_S + 40
    while trio.current_time() < until_s:
        for message in await clients.receive("last", is_steady=True):
            key = message.queue_id, message.queue_offset
            assert key not in pops.settled
            entry = pb.AckMessageEntry(receipt_handle=message.receipt_handle)
            asked = pb.AckMessageRequest(group=GROUP, topic=TOPIC, entries=[entry])
            answer = await clients.handlers.handle("AckMessage")(asked, TrioCall())
            assert answer.entries[0].status.code == pb.OK
            clients.ledger.note(key, clients.serial(), pb.OK)


def judge(world: World, ledger: Ledger, pops: PopGroup) -> None:
    """Compare what was stated with what is there."""
    stored = Counter(world.group.bodies())
    for body, code in ledger.sends.items():
        if code == pb.OK:
            assert stored[body] >= 1, f"{body!r} is stored, it was stated, and it is not"
        elif code not in UNKNOWN:
            assert stored[body] == 0, f"{body!r} is not stored, it was stated ({code}), and it is"
    everything = {
        (queue_id, offset)
        for (topic, queue_id), records in world.group.queues.items()
        if topic == "T"
        for offset in range(len(records))
    }
    assert pops.settled == everything, "each message is acknowledged at the end"
    for key in everything:
        codes = set(ledger.settled[key].values())
        assert codes & {pb.OK, *UNKNOWN}, f"{key} is settled, and each call states {codes}"
    assert {key for key, calls in ledger.settled.items() if pb.OK in calls.values()} <= everything
    for place, calls in ledger.decided.items():
        done = pops.decisions.get(place)
        assert {wanted for wanted, code in calls if code == pb.OK} <= {done}
        if done is not None:
            codes = {code for wanted, code in calls if wanted == done}
            assert codes & {pb.OK, *UNKNOWN}, f"{place} is decided, and each call states {codes}"
    letters = Counter(world.group.bodies("%DLQ%clerks"))
    stated: dict[bytes, set[int]] = {}
    for key in everything:
        # A send whose answer was lost is repeated: one body may stand at two places.
        body = bytes(decode_record(world.group.queue("T", key[0])[key[1]]).body)
        stated.setdefault(body, set()).update(ledger.forwarded.get(key, {}).values())
    for body, codes in stated.items():
        assert pb.OK not in codes or letters[body]
        assert not letters[body] or codes & {pb.OK, *UNKNOWN}, f"{body!r} after {codes}"


@pytest.mark.parametrize("seed", range(3 * EXTENT))
async def test_calls_state_what_becomes_of_messages(seed: int, autojump_clock: MockClock) -> None:
    with capture_logs() as logs:
        await hostile_run(seed)
    assert [each for each in logs if each["event"] == "call_failed"] == []
