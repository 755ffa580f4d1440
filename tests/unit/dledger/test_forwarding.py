"""What a member carries to its leader, with leaders that follow a script."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dledger import forwarding
from dledger.broker_errors import NotLeaderError
from dledger.forwarding import LEADER_WITHIN_S, Forwarder
from dledger.group_api import ServiceCounts
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.outcome import Condition, answer, answer_error
from dledger.remoting.server import RemotingServer
from dledger.testing.doubles import MemoryNetwork, VirtualClock
from tests.harness.present import present

SEND, PULL, BACK = (
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.PULL_MESSAGE,
    RequestCode.CONSUMER_SEND_MSG_BACK,
)
FOLLOWER = ("127.0.0.1", 1)
LEADERS = (("127.0.0.1", 2), ("127.0.0.1", 3))


def old(code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> RemotingCommand:
    """Return a request of a client that finds leaders by its route alone."""
    command = request(code, ext, body)
    command.language = "JAVA"
    return command


def send(name: str = "a", **changes: str) -> RemotingCommand:
    """Return a send as RocketMQ's clients write it, with its UNIQ_KEY."""
    fields = {
        "a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": f"UNIQ_KEY\x01{name}\x02", "j": "0", "k": "false", "m": "false",
    }  # fmt: skip
    return old(SEND, {**fields, **changes}, name.encode())


def stamp_of(command: RemotingCommand) -> tuple[str, ...]:
    names = ("producerId", "producerEpoch", "producerSequence", "producerFirstOpen")
    return tuple(command.ext[name] for name in names if name in command.ext)


Script = Callable[[RemotingCommand], Handled]


def stores(command: RemotingCommand) -> Handled:
    return response_to(command, 0, None, {"queueOffset": "7"}, command.body)


def leads_not(command: RemotingCommand) -> Handled:
    return answer_error(command, NotLeaderError(None, 3))


def is_silent(_command: RemotingCommand) -> Handled:
    return DEFERRED


def forgot(command: RemotingCommand) -> Handled:
    return answer(command, Condition.PRODUCER_UNKNOWN, "", reason=Condition.PRODUCER_UNKNOWN)


@dataclass
class Leader:
    """A member that may lead: it answers what the script has next, and then stores."""

    address: str
    server: RemotingServer
    script: list[Script] = field(default_factory=list)
    got: list[RemotingCommand] = field(default_factory=list)
    sessions: int = 0

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        if command.code == RequestCode.OPEN_PRODUCER:
            self.sessions += 1
            return response_to(command, 0, None, {"producerEpoch": str(10 + self.sessions)})
        self.got.append(command)
        return (self.script.pop(0) if self.script else stores)(command)

    def end(self) -> None:
        """End every connection, as a kill does."""
        for connection in list(self.server.connections):
            connection.close("killed")


class Clock(VirtualClock):
    stood_still_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.stood_still_s


@dataclass
class World:
    """A follower that clients talk to, and two members that may lead."""

    follower: RemotingServer
    forwarder: Forwarder
    group: Any
    leaders: list[Leader]
    client: RemotingClient
    clock: Clock

    def lead(self, number: int | None) -> None:
        """Let a member lead from now on, as the follower knows it."""
        self.group.leader_address = None if number is None else self.leaders[number].address
        self.forwarder.role_changed()

    async def fail_over(self) -> None:
        """Kill the first leader when it has all that is under way; the second one leads."""
        await trio.testing.wait_all_tasks_blocked()
        self.leaders[0].end()
        self.lead(1)

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        return await self.client.invoke("127.0.0.1:1", command, 600)


@asynccontextmanager
async def served(*, stamps: bool = True) -> AsyncIterator[World]:
    network, clock = MemoryNetwork(), Clock()
    group: Any = SimpleNamespace(leader_address=None, term=3, service_counts=ServiceCounts())
    codes: Iterable[int] = (SEND, PULL, BACK, RequestCode.OPEN_PRODUCER)
    async with trio.open_nursery() as nursery:

        async def serve(
            address: tuple[str, int], handler: Callable[[Connection, RemotingCommand], Handled]
        ) -> RemotingServer:
            table = ProcessorTable()
            limiter = Limiter("all", 10_000)
            for code in codes:
                table.register(code, handler, limiter)
            server = RemotingServer(network, table)
            await nursery.start(server.serve, *address)
            return server

        def refuse(_connection: Connection, command: RemotingCommand) -> Handled:
            return answer_error(command, NotLeaderError(group.leader_address, group.term))

        leaders: list[Leader] = []
        for host, port in LEADERS:
            leader: Any = SimpleNamespace()
            leader = Leader(f"{host}:{port}", leader)
            leader.server = await serve((host, port), leader.handle)
            leaders.append(leader)
        links = RemotingClient(nursery, network)
        forwarder = Forwarder(group, links, clock, Random(1), frozenset({PULL}), stamps)
        nursery.start_soon(forwarder.run)
        follower = await serve(FOLLOWER, refuse)
        follower.carry = forwarder.take
        yield World(follower, forwarder, group, leaders, RemotingClient(nursery, network), clock)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("command", [send(), old(PULL, {"topic": "T"}, b"a"), old(BACK)])
async def test_request_is_answered_by_the_leader(command: RemotingCommand) -> None:
    command.version = 401
    async with served() as world:
        world.lead(0)
        answered = await world.ask(command)
        (got,) = world.leaders[0].got
    assert (answered.code, answered.ext, bytes(answered.body)) == (
        0, {"queueOffset": "7"}, bytes(command.body),
    )  # fmt: skip
    assert (got.code, got.version, got.language) == (command.code, 401, "JAVA")
    assert command.ext.items() <= got.ext.items()
    assert got.serialize is SerializeType.CBOR


@pytest.mark.parametrize(
    ("language", "serialize"), [("JAVA", SerializeType.CBOR), ("PYTHON", SerializeType.JSON)]
)
async def test_client_that_follows_gets_the_refusal(
    language: str, serialize: SerializeType
) -> None:
    async with served() as world:
        world.lead(0)
        command = send()
        command.language, command.serialize = language, serialize
        answered = await world.ask(command)
        assert (answered.code, answered.ext["leaderAddr"]) == (14, "127.0.0.1:2")
        assert world.leaders[0].got == []


async def test_request_waits_for_a_leader_and_not_without_end() -> None:
    async with served() as world, trio.open_nursery() as nursery:
        began = trio.current_time()
        refused = await world.ask(old(PULL))
        assert (refused.code, refused.ext["outcome"]) == (14, "not_stored")
        assert trio.current_time() - began == pytest.approx(LEADER_WITHIN_S)
        nursery.start_soon(world.ask, send())
        await trio.sleep(LEADER_WITHIN_S - 0.1)
        world.lead(1)
        await trio.sleep(0.05)
        assert len(world.leaders[1].got) == 1
        assert len(world.forwarder) == 0


async def test_send_is_repeated_under_its_stamp_after_a_kill() -> None:
    async with served() as world, trio.open_nursery() as nursery:
        world.lead(0)
        world.leaders[0].script = [is_silent]
        answers = []

        async def ask() -> None:
            answers.append(await world.ask(send()))

        nursery.start_soon(ask)
        await world.fail_over()
        await trio.sleep(1)
        first = stamp_of(world.leaders[0].got[0])
        assert first == stamp_of(world.leaders[1].got[0])
        assert first[1:] == ("11", "0", "0")
        assert [each.code for each in answers] == [0]
        await world.ask(send("b"))
        assert stamp_of(world.leaders[1].got[1])[2:] == ("1", "1"), "the next of that session"


@pytest.mark.parametrize(
    ("command", "stamps"),
    [
        (old(BACK, {"group": "g"}), True),
        (send(), False),
        (send(Signature="s", AccessKey="k"), True),
        (send(i=""), True),
        (send(e="-1"), True),
    ],
    ids=["sent back", "access control", "signed", "without key", "without queue"],
)
async def test_what_has_no_stamp_is_unknown_after_a_kill(
    command: RemotingCommand, stamps: bool
) -> None:
    async with served(stamps=stamps) as world, trio.open_nursery() as nursery:
        world.lead(0)
        world.leaders[0].script = [is_silent]
        nursery.start_soon(world.fail_over)
        answered = await world.ask(command)
        assert (answered.code, answered.ext["outcome"]) == (1, "unknown")
        assert stamp_of(world.leaders[0].got[0]) == ()
        assert world.leaders[1].got == []


async def test_read_is_repeated_at_the_next_leader() -> None:
    async with served() as world, trio.open_nursery() as nursery:
        world.lead(0)
        world.leaders[0].script = [is_silent]

        async def kill() -> None:
            await trio.sleep(20)  # a pull that is held
            world.lead(None)
            world.leaders[0].end()
            await trio.sleep(1)
            world.lead(1)

        nursery.start_soon(kill)
        assert (await world.ask(old(PULL))).code == 0
        assert len(world.leaders[1].got) == 1


async def test_frozen_former_leader_holds_no_request() -> None:
    async with served() as world, trio.open_nursery() as nursery:
        world.lead(0)
        world.leaders[0].script = [is_silent]

        async def move() -> None:
            await trio.sleep(5)
            world.lead(1)

        nursery.start_soon(move)
        began = trio.current_time()
        assert (await world.ask(send())).code == 0
        assert trio.current_time() - began == pytest.approx(5 + forwarding.FORMER_WITHIN_S, abs=0.2)


async def test_what_waited_while_the_member_stood_still_is_refused() -> None:
    async with served() as world:
        world.lead(0)
        assert (await world.ask(send())).code == 0
        world.clock.stood_still_s += 20
        assert (await world.ask(send())).ext["outcome"] == "not_stored"
        assert len(world.leaders[0].got) == 1
        await trio.sleep(forwarding.STALE_S)
        assert (await world.ask(send())).code == 0


async def test_refusal_by_one_that_leads_not_is_tried_again() -> None:
    async with served() as world:
        world.lead(0)
        world.leaders[0].script = [leads_not, leads_not]
        assert (await world.ask(send())).code == 0
        assert len(world.leaders[0].got) == 3
        assert len(set(map(stamp_of, world.leaders[0].got))) == 1


async def test_session_that_the_leader_forgot_is_replaced() -> None:
    async with served() as world:
        world.lead(0)
        world.leaders[0].script = [stores, forgot]
        await world.ask(send("a"))
        assert (await world.ask(send("b"))).code == 0
        _, refused, stored = world.leaders[0].got
        assert stamp_of(refused)[0] != stamp_of(stored)[0]


async def test_repetition_that_waits_goes_under_no_other_session() -> None:
    async with served() as world:
        connection = await world.client.connection("127.0.0.1:1")
        outcomes: dict[str, str | None] = {}

        def note(name: str) -> Callable[[Any], None]:
            return lambda call: outcomes.update({name: call.response.ext.get("outcome")})

        world.lead(0)
        world.leaders[0].script = [stores, is_silent, forgot]
        await world.ask(send("first"))
        connection.start(send("uncertain"), note("uncertain"))
        await trio.testing.wait_all_tasks_blocked()
        world.lead(None)
        world.leaders[0].end()
        await trio.testing.wait_all_tasks_blocked()
        world.leaders[0].script = [forgot, forgot]
        connection.start(send("certain"), note("certain"))
        await trio.testing.wait_all_tasks_blocked()
        world.lead(0)
        await trio.sleep(1)
        assert outcomes == {"uncertain": "unknown", "certain": None}
        bodies = [bytes(got.body) for got in world.leaders[0].got]
        assert bodies[-1] == b"certain"
        assert bodies.count(b"uncertain") == 2


async def test_send_under_way_is_repeated_under_no_other_session() -> None:
    async with served() as world:
        connection = await world.client.connection("127.0.0.1:1")
        outcomes: list[str | None] = []
        world.lead(0)
        world.leaders[0].script = [stores, is_silent, forgot]
        await world.ask(send("first"))
        connection.start(
            send("silent"), lambda call: outcomes.append(present(call.response).ext.get("outcome"))
        )
        await trio.testing.wait_all_tasks_blocked()
        assert (await world.ask(send("forgotten"))).code == 0
        world.leaders[0].end()
        await trio.sleep(1)
        assert outcomes == ["unknown"]
        assert [bytes(got.body) for got in world.leaders[0].got].count(b"silent") == 1


async def test_sends_keep_their_order_over_a_kill() -> None:
    async with served() as world:
        connection = await world.client.connection("127.0.0.1:1")
        for name in "abc":
            connection.start(send(name), lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        world.leaders[0].script = [is_silent] * 3
        world.lead(0)
        await trio.sleep(1)
        world.lead(None)
        world.leaders[0].end()
        for name in "def":
            connection.start(send(name), lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        world.lead(1)
        await trio.sleep(1)
        assert [bytes(got.body) for got in world.leaders[1].got] == [*map(str.encode, "abcdef")]


async def test_more_than_is_carried_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "FORWARDED_REQUESTS_MAX", 2)
    async with served() as world:
        connection = await world.client.connection("127.0.0.1:1")
        codes = []

        def ended(call: Any) -> None:
            codes.append(call.response.code)

        for _ in range(3):
            connection.start(old(PULL), ended)
        await trio.testing.wait_all_tasks_blocked()
        assert codes == [14]
        assert world.group.service_counts.forwarded == {"taken": 2, "repeated": 0, "refused": 1}
        monkeypatch.setattr(forwarding, "FORWARDED_REQUESTS_MAX", 9)
        monkeypatch.setattr(forwarding, "FORWARDED_BYTES_MAX", 3)
        connection.start(old(PULL, {}, b"four"), ended)
        await trio.testing.wait_all_tasks_blocked()
        assert codes == [14, 14]
        await trio.sleep(LEADER_WITHIN_S + 0.1)
        assert codes == [14] * 4
        assert (world.forwarder.size_bytes, len(world.forwarder)) == (0, 0)


async def test_one_way_request_is_carried_without_an_answer() -> None:
    async with served() as world:
        world.lead(0)
        await world.client.invoke_oneway("127.0.0.1:1", old(PULL))
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.leaders[0].got) == 1
        assert world.leaders[0].got[0].is_oneway
        assert len(world.forwarder) == 0
