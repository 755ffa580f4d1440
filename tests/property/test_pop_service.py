"""POP by its requests beside a small model: what comes to whom, when, how often, and how long.

One broker group without consensus: a fail-over is another broker over the same applied state, or
over a snapshot of it. Deliveries, dead letters and lag are compared after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dledger.commitlog.record import iter_records
from dledger.remoting.processor import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.pop_requests import PopMessageResponseHeader
from dledger.remoting.protocol.receipt_handle import ReceiptHandle
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import SubscriptionGroupsChange, state_batch
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.extent import examples
from tests.harness.fake_group import BROKER, FakeGroup, Term

GROUPS = {"plain": False, "ordered": True}
"""Consumer groups, and whether they receive in order."""
RETRIES = 2
ALL = 1_000


@dataclass
class Message:
    """A message of one group's point of view."""

    attempts: int = 0
    until_ms: int = 0
    receipt: ReceiptHandle | None = None
    is_done: bool = False
    is_dead: bool = False


@dataclass
class Side:
    """What one group has done with the queue."""

    messages: list[Message] = field(default_factory=list)
    old: list[tuple[int, ReceiptHandle]] = field(default_factory=list)
    offset: int | None = None

    def left(self) -> list[int]:
        return [at for at, each in enumerate(self.messages) if not (each.is_done or each.is_dead)]


class PopService(RuleBasedStateMachine):
    """Two groups, one queue."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.clock = ManualClock(now_s=100.0)
        self.group = FakeGroup(Path(self.folder.name), self.clock)
        self.broker = Broker(self.group, self.clock)
        self.broker.make_topic("T", queues=1)
        configs = tuple(SubscriptionGroupConfig(name, retry_max_times=RETRIES) for name in GROUPS)
        self.group.propose(state_batch(SubscriptionGroupsChange(configs)), lambda _: None)
        self.group.settle()
        self.sides = {name: Side() for name in GROUPS}

    def teardown(self) -> None:
        self.group.close()
        self.folder.cleanup()

    def ask(self, code: int, ext: dict[str, Any]) -> RemotingCommand:
        command = request(code, {name: str(value) for name, value in ext.items()})
        handled = self.broker.handle(command)
        while handled is DEFERRED:
            self.group.settle()
            found = [each for asked, each in self.broker.connection.replies if asked is command]
            if found:
                return found[0]
        assert isinstance(handled, RemotingCommand)
        return handled

    @property
    def now_ms(self) -> int:
        return max(self.clock.wall_ms(), self.group.state.last_store_time_ms)

    # ------------------------------------------------------------------------------ steps

    @rule(count=st.integers(1, 3))
    def send(self, count: int) -> None:
        first = len(self.sides["plain"].messages)
        self.group.put("T", 0, *[b"%d" % (first + number) for number in range(count)])
        for side in self.sides.values():
            side.messages += [Message() for _ in range(count)]

    @rule(ms=st.integers(1, 400))
    def time_passes(self, ms: int) -> None:
        self.clock.now_s += ms / 1000

    @rule(with_snapshot=st.booleans())
    def fail_over(self, with_snapshot: bool) -> None:
        if with_snapshot:
            state = self.group.state
            state.become(load(snapshot(state), state))
        self.group.term += 1
        self.group.leadership = Term(self.group.term)
        self.group.on_applied.clear()
        self.broker = Broker(self.group, self.clock)

    @rule(
        name=st.sampled_from(sorted(GROUPS)),
        count=st.sampled_from([1, 2, ALL]),
        ms=st.integers(1, 500),
    )
    def receive(self, name: str, count: int, ms: int) -> None:
        side, in_order = self.sides[name], GROUPS[name]
        expected, dying = self.expected(side, in_order, count)
        answer = self.ask(
            RequestCode.POP_MESSAGE,
            {
                "consumerGroup": name,
                "topic": "T",
                "queueId": 0,
                "maxMsgNums": count,
                "invisibleTime": ms,
                "pollTime": 0,
                "bornTime": 0,
                "initMode": 0,
                "order": "true" if in_order else "false",
            },
        )
        self.group.settle()
        for at in dying:
            side.messages[at].is_dead = True
        if not expected:
            assert answer.code == ResponseCode.PULL_NOT_FOUND
            return
        assert answer.code == 0, answer
        header = PopMessageResponseHeader.decode(answer.ext)
        records = list(iter_records(bytes(answer.body)))
        got = [record.queue_offset for record in records]
        assert len(set(got)) == len(got) == min(count, len(expected))
        assert set(got) <= set(expected)
        if in_order:
            assert got == expected[: len(got)]
        for record in records:
            at, message = record.queue_offset, side.messages[record.queue_offset]
            assert bytes(record.body) == b"%d" % at
            if message.receipt is not None:
                side.old.append((at, message.receipt))
            message.attempts += 1
            assert record.reconsume_times == message.attempts - 1
            message.until_ms = header.pop_time + ms
            message.receipt = ReceiptHandle(
                0, header.pop_time, ms, header.revive_qid, BROKER, 0, at
            )

    def expected(self, side: Side, in_order: bool, count: int) -> tuple[list[int], list[int]]:
        """Return what may be handed out now, and what is given up by the way."""
        now_ms, left = self.now_ms, side.left()
        over = [at for at in left if side.messages[at].until_ms <= now_ms]
        if in_order:
            if len(over) < len(left):
                return [], []
        else:
            over.sort(
                key=lambda at: (side.messages[at].attempts == 0, side.messages[at].until_ms, at)
            )
        alive: list[int] = []
        dying: list[int] = []
        for at in over:
            if side.messages[at].attempts > RETRIES and len(alive) < count:
                dying.append(at)
            elif side.messages[at].attempts <= RETRIES:
                alive.append(at)
        return alive, dying

    @precondition(lambda self: any(self.receipts()))
    @rule(data=st.data(), ms=st.integers(1, 500), is_change=st.booleans())
    def use_a_receipt(self, data: st.DataObject, ms: int, is_change: bool) -> None:
        name, at, receipt = data.draw(st.sampled_from(self.receipts()))
        side, message = self.sides[name], self.sides[name].messages[at]
        is_current = message.receipt == receipt and not (message.is_done or message.is_dead)
        ext = {
            "consumerGroup": name,
            "topic": "T",
            "queueId": 0,
            "offset": at,
            "extraInfo": receipt.encode(),
        }
        if not is_change:
            answer = self.ask(RequestCode.ACK_MESSAGE, ext)
            message.is_done |= is_current
        else:
            answer = self.ask(
                RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**ext, "invisibleTime": ms}
            )
            if is_current:
                popped = int(answer.ext["popTime"])
                message.until_ms = popped + ms
                message.receipt = ReceiptHandle(
                    at, popped, ms, int(answer.ext["reviveQid"]), BROKER, 0, at
                )
                side.old.append((at, receipt))
        assert answer.code == (0 if is_current else ResponseCode.NO_MESSAGE)

    def receipts(self) -> list[tuple[str, int, ReceiptHandle]]:
        return [
            (name, at, receipt)
            for name, side in self.sides.items()
            for at, receipt in (
                *side.old[-8:],
                *((at, each.receipt) for at, each in enumerate(side.messages) if each.receipt),
            )
        ]

    # ------------------------------------------------------------------------------ compared

    @invariant()
    def dead_letters_are_those_that_were_spent(self) -> None:
        for name, side in self.sides.items():
            dead = sum(message.is_dead for message in side.messages)
            assert self.group.state.max_offset(f"%DLQ%{name}", 0) == dead

    @invariant()
    def offset_is_the_lowest_that_is_left(self) -> None:
        for name, side in self.sides.items():
            offset = self.group.state.consumer_offset(name, "T", 0)
            if offset is not None:
                touched = [at for at, each in enumerate(side.messages) if each.attempts]
                left = [at for at in side.left() if side.messages[at].attempts]
                assert offset == min(left, default=max(touched, default=-1) + 1)


TestPopService = PopService.TestCase
TestPopService.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
