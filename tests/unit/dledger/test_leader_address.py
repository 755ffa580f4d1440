"""The address that moves with the leadership: which member holds it, and when."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from dledger.leader_address import (
    RESET_AFTER_S,
    RESET_REASON,
    RETRY_S,
    LeaderAddress,
    LeaderAddressError,
)
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.server import RemotingServer
from dledger.settings.tables import BrokerTable
from dledger.testing.doubles import MemoryNetwork, VirtualClock

HOST, PORT = "10.0.0.9", 10911
ADDRESS = f"{HOST}:{PORT}"
TIMEOUT_S = 2.0


@dataclass
class Hook:
    """A command that notes how it is called, and what it is to do when."""

    calls: list[tuple[str, ...]] = field(default_factory=list)
    script: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)

    async def run(self, words: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(tuple(words))
        if words[-2] in self.script:
            await self.script[words[-2]]()

    @property
    def events(self) -> list[str]:
        return [words[-2] for words in self.calls]


async def fail() -> None:
    raise OSError("no such device")


@dataclass
class Member:
    network: MemoryNetwork
    hook: Hook
    group: Any
    address: LeaderAddress

    def lead(self, term: int | None) -> None:
        self.group.leadership = None if term is None else SimpleNamespace(term=term)
        self.address.role_changed()

    async def connects(self) -> bool:
        await trio.testing.wait_all_tasks_blocked()
        try:
            stream = await self.network.connect(HOST, PORT, timeout_s=1)
        except OSError:
            return False
        await stream.aclose()
        return True


def member(network: MemoryNetwork, *, listens: bool = True, hooked: bool = True) -> Member:
    hook, group = Hook(), SimpleNamespace(leadership=None)
    table = BrokerTable(
        leader_address=ADDRESS,
        leader_address_listen=listens,
        leader_hook="move --fast 'an address'" if hooked else "",
        leader_hook_timeout_ms=int(TIMEOUT_S * 1000),
    )
    servers = [RemotingServer(network, ProcessorTable())]
    held: Any = LeaderAddress(group, table, servers, VirtualClock(), hook.run)
    return Member(network, hook, group, held)


@asynccontextmanager
async def running(one: Member) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(one.address.run)
        yield
        nursery.cancel_scope.cancel()


async def test_leader_runs_the_hook_and_then_listens() -> None:
    one = member(MemoryNetwork())
    async with running(one):
        assert not await one.connects()
        one.lead(1)
        assert await one.connects()
        one.lead(None)
        assert not await one.connects()
    words = ("move", "--fast", "an address")
    assert one.hook.calls == [(*words, e, ADDRESS) for e in ("loss", "gain", "loss")]


async def test_next_leader_listens_when_the_former_one_has_ended() -> None:
    network = MemoryNetwork()
    former, following = member(network, hooked=False), member(network, hooked=False)
    async with running(former), running(following):
        former.lead(1)
        assert await former.connects()
        following.lead(2)  # the former one does not know it yet
        await trio.sleep(10 * RETRY_S)
        former.lead(None)
        await trio.sleep(RETRY_S)
        assert await following.connects()
        following.lead(None)
        assert not await following.connects()


@pytest.mark.parametrize(("listens", "hooked"), [(True, False), (True, True), (False, False)])
async def test_connections_are_reset_when_leadership_ends(listens: bool, hooked: bool) -> None:
    """A hook, or a balancer, may have led clients to this member's own address."""
    one, own = member(MemoryNetwork(), listens=listens, hooked=hooked), ("10.0.0.1", 1)
    addresses = {own, (HOST, PORT)} if listens else {own}
    (server,) = one.address.servers
    async with running(one), trio.open_nursery() as nursery:
        await nursery.start(server.serve, *own)
        one.lead(1)
        await trio.testing.wait_all_tasks_blocked()
        for address in addresses:
            await one.network.connect(*address, timeout_s=1)
        await trio.testing.wait_all_tasks_blocked()
        connections = {each.local_address: each for each in server.connections}
        one.lead(None)
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.connections) == (0 if hooked else len(addresses))
        await trio.sleep(0 if hooked else RESET_AFTER_S)
        await trio.testing.wait_all_tasks_blocked()
        reset = {at for at, each in connections.items() if each.close_reason == RESET_REASON}
        assert reset == (addresses if hooked or not listens else {(HOST, PORT)})
        nursery.cancel_scope.cancel()


async def test_gain_that_fails_is_tried_again() -> None:
    one = member(MemoryNetwork())
    one.hook.script["gain"] = fail
    async with running(one):
        one.lead(1)
        await trio.sleep(2.5 * RETRY_S)
        assert one.hook.events == ["loss", "gain", "gain", "gain"]
        assert not await one.connects()
        del one.hook.script["gain"]
        await trio.sleep(RETRY_S)
        assert await one.connects()


@pytest.mark.parametrize("failure", [fail, trio.sleep_forever])
async def test_loss_that_fails_ends_the_member(failure: Callable[[], Awaitable[None]]) -> None:
    one = member(MemoryNetwork())
    with pytest.RaisesGroup(pytest.RaisesExc(LeaderAddressError, match=ADDRESS)):
        async with trio.open_nursery() as nursery:
            await nursery.start(one.address.run)
            one.lead(1)
            assert await one.connects()
            one.hook.script["loss"] = failure
            one.lead(None)
            await trio.sleep(TIMEOUT_S + 1)
            pytest.fail("it goes on")
    assert not await one.connects()


async def test_member_starts_only_when_the_hook_gave_the_address_back() -> None:
    one = member(MemoryNetwork())
    one.hook.script["loss"] = fail
    with pytest.RaisesGroup(LeaderAddressError):
        async with running(one):
            pytest.fail("it starts")


async def test_leadership_that_ends_during_a_gain_is_lost() -> None:
    one = member(MemoryNetwork())
    one.hook.script["gain"] = trio.sleep_forever
    async with running(one):
        one.lead(1)
        await trio.testing.wait_all_tasks_blocked()
        one.lead(None)
        await trio.testing.wait_all_tasks_blocked()
        assert one.hook.events == ["loss", "gain", "loss"]
        one.lead(2)
        one.lead(3)  # no turn between them
        await trio.testing.wait_all_tasks_blocked()
        assert one.hook.events == ["loss", "gain", "loss", "gain"]


async def test_member_that_stops_gives_the_address_back() -> None:
    one = member(MemoryNetwork())
    async with running(one):
        one.lead(1)
        assert await one.connects()
    assert one.hook.events == ["loss", "gain", "loss"]
