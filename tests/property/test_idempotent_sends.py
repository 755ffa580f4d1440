"""Repeated, lost, delayed or forgotten: a send is stored once, where its answers say."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.state.producer_sessions import SESSION_IDLE_MAX_MS
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup

ID = b"0123456789abcdef"
QUEUES = 2

step = st.one_of(
    st.tuples(st.just("send"), st.integers(0, QUEUES - 1), st.integers(1, 3)),
    st.tuples(st.just("repeat"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("old_copy"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("give_up"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
    st.tuples(st.just("append"), st.just(0), st.just(0)),
    st.tuples(st.just("time_out"), st.just(0), st.just(0)),
    st.tuples(st.just("new_leader"), st.booleans(), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("long_pause"), st.just(0), st.just(0)),
)


@dataclass(eq=False)
class Sent:
    """A send of the client, and what was answered to its attempts."""

    epoch: int
    sequence: int
    queue_id: int
    bodies: tuple[bytes, ...]
    attempts: int = 0
    answers: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_stored(self) -> bool:
        return any(outcome == "stored" for outcome, _ in self.answers)


class Client:
    """A producer that repeats what it likes, in any order, over a broker that changes."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.broker = Broker(group, group.clock)
        self.broker.make_topic("T", QUEUES)
        self.every: list[Sent] = []
        self.open: list[Sent] = []
        self.sequence = 0
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        ext = {"producerId": ID.hex(), "producerEpoch": str(self.epoch)}
        self.epoch = int(self.broker.call(RequestCode.OPEN_PRODUCER, ext).ext["producerEpoch"])
        self.sequence = 0
        self.open = []

    def send(self, queue_id: int, count: int) -> None:
        number = len(self.every)
        bodies = tuple(b"%d.%d" % (number, i) for i in range(count))
        sent = Sent(self.epoch, self.sequence, queue_id, bodies)
        self.sequence += 1
        self.every.append(sent)
        self.open.append(sent)
        self.attempt(sent)

    def attempt(self, sent: Sent) -> None:
        mine = [other for other in self.open if other.epoch == sent.epoch]
        first_open = min([other.sequence for other in mine], default=sent.sequence)
        first_open = min(first_open, sent.sequence)
        records = [
            encode_record(
                topic="T",
                queue_id=sent.queue_id,
                body=body,
                properties=b"UNIQ_KEY\x01%b\x02" % body,
            )
            for body in sent.bodies
        ]
        ext: dict[str, Any] = {
            "runs": [["T", sent.queue_id, len(records)]],
            "producer": [ID, sent.epoch, sent.sequence, first_open],
        }
        body = struct.pack(f">{len(records)}I", *map(len, records)) + b"".join(records)
        sent.attempts += 1
        reported = _Told(self, sent)
        handled = self.broker.handle(request(RequestCode.SEND_RECORDS, ext, body), reported)
        if isinstance(handled, RemotingCommand):
            reported.reply(handled, handled)

    def take(self, sent: Sent, answer: RemotingCommand) -> None:
        if answer.code == 0:
            ((code, offset, *_),) = answer.ext["results"]
            assert code == 0
            sent.answers.append(("stored", offset))
            self.settle(sent)
        else:
            sent.answers.append((answer.ext["outcome"], -1))
            if answer.ext.get("reason") == "sequence_too_old":
                self.settle(sent)

    def settle(self, sent: Sent) -> None:
        if sent in self.open:
            self.open.remove(sent)

    def is_forgotten(self) -> bool:
        return self.group.state.producers.get(ID) is None

    def play(self, what: str, number: int) -> None:
        group = self.group
        match what:
            case "send":
                raise AssertionError("see run")
            case "repeat" if self.open:
                self.attempt(self.open[number % len(self.open)])
            case "old_copy" if self.every:
                self.attempt(self.every[number % len(self.every)])  # from somewhere in the network
            case "give_up" if self.open:
                self.settle(self.open[number % len(self.open)])
            case "settle":
                group.settle()
            case "append":
                group.append()
            case "time_out":
                group.time_out()
            case "new_leader":
                if number:
                    group.append()
                group.step_down()
                group.lead()
            case "restart":
                group.append()
                group.step_down()
                group.lead()
                self.broker = Broker(group, group.clock)
            case "long_pause":
                assert isinstance(group.clock, ManualClock)
                group.clock.now_s += SESSION_IDLE_MAX_MS / 1000 + 1
                other = {"producerId": "41" * 16, "producerEpoch": str(group.log.last_index + 1)}
                self.broker.handle(
                    request(RequestCode.OPEN_PRODUCER, other),
                    FakeConnection(),
                )
            case _:
                pass


@dataclass(eq=False)
class _Told(FakeConnection):
    client: Client = None  # type: ignore[assignment]  # set by __init__
    sent: Sent = None  # type: ignore[assignment]  # set by __init__

    def __init__(self, client: Client, sent: Sent) -> None:
        super().__init__()
        self.client, self.sent = client, sent

    def reply(self, asked: RemotingCommand, response: RemotingCommand) -> bool:
        self.client.take(self.sent, response)
        return True


def stored_bodies(group: FakeGroup, queue_id: int) -> list[bytes]:
    count = group.state.max_offset("T", queue_id)
    units = group.queues.queue("T", queue_id).read(0, count)
    return [
        bytes(decode_record(group.log.record_at(int(unit["phy_offset"]))).body) for unit in units
    ]


def run(steps: list[tuple[str, int, int]]) -> tuple[Client, list[list[bytes]]]:
    with tempfile.TemporaryDirectory() as folder:
        group = FakeGroup(Path(folder), ManualClock())
        client = Client(group)
        for what, number, count in steps:
            if client.is_forgotten() and what in ("send", "repeat"):
                group.settle()
                client.begin()
            if what == "send":
                client.send(number, count)
            else:
                client.play(what, number)
        group.settle()
        queues = [stored_bodies(group, queue_id) for queue_id in range(QUEUES)]
        group.close()
    return client, queues


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40))
def test_idempotent_send_is_stored_once_where_answered(
    steps: list[tuple[str, int, int]],
) -> None:
    client, queues = run(steps)
    for sent in client.every:
        queue = queues[sent.queue_id]
        places = [at for at, body in enumerate(queue) if body == sent.bodies[0]]
        assert len(places) <= 1, "stored twice"
        answered = {offset for outcome, offset in sent.answers if outcome == "stored"}
        assert len(answered) <= 1, "answered differently"
        if answered:
            assert answered == set(places)
        if places:
            at = places[0]
            assert tuple(queue[at : at + len(sent.bodies)]) == sent.bodies
        elif len(sent.answers) == sent.attempts:
            assert not sent.is_stored
        outcomes = {outcome for outcome, _ in sent.answers}
        if len(sent.answers) == sent.attempts and outcomes == {"not_stored"}:
            assert not places, "reported as not stored, and there it is"
    everything = [body for queue in queues for body in queue]
    assert len(everything) == len(set(everything))


@settings(max_examples=60, deadline=None)
@given(st.lists(step.filter(lambda item: item[0] not in ("old_copy", "long_pause")), max_size=40))
def test_with_the_session_alive_every_repetition_is_judged(
    steps: list[tuple[str, int, int]],
) -> None:
    client, queues = run(steps)
    # What is still open can be repeated to its end, the oldest first.
    with_answers = [sent for sent in client.open if sent.answers]
    assert all(not sent.is_stored for sent in with_answers)
    everything = [body for queue in queues for body in queue]
    assert len(everything) == len(set(everything))
