"""The leader of each broker group: what answers and routes name, and the search for a new one.

A route names the leader as broker id 0, but lags: brokers register again after an election, and
clients poll. A "not leader" answer is fresher and carries the term, so it wins until the route
itself changes or the address fails. When the known leader does not answer, or denies that it leads,
all members and a NameServer are asked at the same time; all tasks of a client share one search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from client.core.errors import ClientError
from client.core.links import truth
from client.core.retry import FailureKind, failure_of_answer
from commitlog.errors import MQError
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.outcome import LEADER_FIELD, TERM_FIELD

if TYPE_CHECKING:
    from client.core.client_instance import ClientInstance


@dataclass(slots=True)
class _Group:
    term: int = -1
    hinted: str | None = None
    routed: str | None = None


class LeaderTable:
    """Broker name → address of the leader."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def address(self, broker_name: str) -> str | None:
        """Return the address to send to, or None when nobody is known to lead."""
        group = self._groups.get(broker_name)
        if group is None:
            return None
        return group.hinted or group.routed

    def term(self, broker_name: str) -> int:
        """Return the highest term heard of, -1 before any."""
        group = self._groups.get(broker_name)
        return -1 if group is None else group.term

    def learn(
        self, broker_name: str, address: str, term: int, *, told_by: str | None = None
    ) -> bool:
        """Take a hint; return whether it was news or a confirmation, False for a stale one.

        A hint of a lower term than one already heard is from a node that has slept, unless the
        very node we took for the leader says so: then the group has been set up anew.

        Args:
            broker_name: The group.
            address: Who is said to lead.
            term: In which term.
            told_by: Address of the node that said it.
        """
        group = self._groups.setdefault(broker_name, _Group())
        if term < group.term and (told_by is None or told_by != group.hinted):
            return False
        group.term = term
        group.hinted = address
        return True

    def take_route(self, broker_name: str, address: str | None) -> None:
        """Take what a fresh route says; it overrides a hint only where it changed."""
        group = self._groups.setdefault(broker_name, _Group())
        if address == group.routed:
            return
        group.routed = address
        if address is not None:
            group.hinted = None

    def suspect(self, broker_name: str, address: str) -> None:
        """Drop the hint to an address that failed; the route's word stands again.

        If the route names the failed address too, a search has to find the next leader.
        """
        group = self._groups.get(broker_name)
        if group is not None and group.hinted == address:
            group.hinted = None


SEARCH_S: Final = 0.25
"""One round of asking all members of a group who leads; a silent one must not hold it up."""
PATIENCE: Final = 8
"""A search waits after a fruitless one for this part of the time since the first of them. So a
group without a majority is not besieged, and its leader is found an eighth later at most."""
PAUSE_S_MAX: Final = 1.0
"""And no longer than this, however long there has been no leader."""


@dataclass(slots=True)
class _Fruitless:
    """Searches in a row that found nobody."""

    since_s: float
    not_before_s: float


class LeaderSearch:
    """What a client instance does to find leaders."""

    def __init__(self, instance: ClientInstance) -> None:
        self._instance = instance
        self._not_ready: dict[str, str] = {}
        # Who failed last and in which term: others may go on naming it for long.
        self._failed: dict[str, tuple[str, int]] = {}
        self._searches: dict[str, trio.Event] = {}
        self._fruitless: dict[str, _Fruitless] = {}

    def note_refusal(self, broker_name: str, address: str, answer: RemotingCommand) -> FailureKind:
        """Learn what a refusing answer says about the leader; return what kind of failure it is."""
        leaders = self._instance.leaders
        kind, hint, term = failure_of_answer(answer)
        if hint == address and leaders.learn(broker_name, address, term, told_by=address):
            # Elected, but it has not applied the entry of its own term yet: a matter of moments.
            self._not_ready[broker_name] = address
            return FailureKind.NOT_LEADER if kind is FailureKind.REDIRECTED else kind
        if hint and hint != address and leaders.learn(broker_name, hint, term, told_by=address):
            if kind is FailureKind.REDIRECTED:
                self._instance.counters.redirects_by_hint += 1
            self._instance.heartbeats.look()
            return kind
        if kind is FailureKind.REDIRECTED:
            # A hint that is old, or names the node that just denied it.
            leaders.suspect(broker_name, address)
            return FailureKind.NOT_LEADER
        return kind

    async def pause(
        self,
        broker_name: str,
        delay_s: float,
        *,
        topic: str,
        failed: str | None,
        failed_term: int,
    ) -> None:
        """Wait *delay_s* before the next attempt, or less if another leader is found meanwhile.

        Args:
            broker_name: The group.
            delay_s: Longest pause once the members have answered.
            topic: Whose route is refreshed.
            failed: The address that failed; naming it again in the same term is no news. None:
                nobody was known; it is the one that failed last.
            failed_term: The term known when it failed.
        """
        clock = self._instance.clock
        until_s = clock.monotonic() + delay_s
        if failed is not None and self._not_ready.pop(broker_name, None) == failed:
            await clock.sleep(delay_s)
            return
        if failed is not None:
            self._instance.leaders.suspect(broker_name, failed)
            self._failed[broker_name] = (failed, failed_term)
        else:
            failed, failed_term = self._failed.get(broker_name, (None, failed_term))
        search = self._searches.get(broker_name)
        if search is not None:
            with trio.move_on_after(SEARCH_S):
                await search.wait()
        elif self._may_search(broker_name):
            await self._search(broker_name, topic, failed, failed_term)
        if not self._is_news(broker_name, failed, failed_term):
            await clock.sleep(max(0.0, until_s - clock.monotonic()))

    def _is_news(self, broker_name: str, failed: str | None, failed_term: int) -> bool:
        leaders = self._instance.leaders
        address = leaders.address(broker_name)
        return address is not None and (
            address != failed or leaders.term(broker_name) > failed_term
        )

    def _may_search(self, broker_name: str) -> bool:
        fruitless = self._fruitless.get(broker_name)
        if fruitless is None:
            return True
        now_s = self._instance.clock.monotonic()
        if now_s > fruitless.not_before_s + PAUSE_S_MAX:
            # Nobody has looked since: that was another time without a leader.
            del self._fruitless[broker_name]
            return True
        return now_s >= fruitless.not_before_s

    async def _search(
        self, broker_name: str, topic: str, failed: str | None, failed_term: int
    ) -> None:
        begin_s = self._instance.clock.monotonic()
        search = self._searches[broker_name] = trio.Event()
        try:
            await self._ask_all(broker_name, topic, failed, failed_term)
        finally:
            del self._searches[broker_name]
            search.set()
        if self._is_news(broker_name, failed, failed_term):
            self._fruitless.pop(broker_name, None)
            return
        fruitless = self._fruitless.setdefault(broker_name, _Fruitless(begin_s, begin_s))
        now_s = self._instance.clock.monotonic()
        fruitless.not_before_s = now_s + min((now_s - fruitless.since_s) / PATIENCE, PAUSE_S_MAX)

    async def _ask_all(
        self, broker_name: str, topic: str, failed: str | None, failed_term: int
    ) -> None:
        instance = self._instance
        instance.counters.leader_searches += 1
        with trio.move_on_after(SEARCH_S):
            async with trio.open_nursery() as nursery:

                def look() -> None:
                    if self._is_news(broker_name, failed, failed_term):
                        nursery.cancel_scope.cancel()

                async def ask_member(address: str) -> None:
                    leader, term = await self._leader_named_by(address, broker_name)
                    # What others say of the one that failed is older than the failure.
                    if leader is not None and (
                        leader == address or (leader, term) != (failed, failed_term)
                    ):
                        instance.leaders.learn(broker_name, leader, term, told_by=address)
                        if self._is_news(broker_name, failed, failed_term):
                            instance.counters.leaders_found += 1
                            instance.heartbeats.look()
                        look()

                async def ask_name_server() -> None:
                    try:
                        await instance.refresh_route(topic)
                    except MQError:
                        return
                    look()

                for member in instance.member_addresses(broker_name):
                    nursery.start_soon(ask_member, member)
                nursery.start_soon(ask_name_server)

    async def _leader_named_by(self, address: str, broker_name: str) -> tuple[str | None, int]:
        """Return who leads and in which term, as a member says; None when it does not know."""
        instance = self._instance
        try:
            link = await instance.link(address, SEARCH_S, group=broker_name)
            if not link.records:
                return None, -1  # a real RocketMQ: its NameServers know
            answer = await instance.ask(
                address, RequestCode.RAFT_STATUS, timeout_s=SEARCH_S, group=broker_name
            )
        except (ClientError, MQError):
            return None, -1
        return _leader_of_status(address, answer)


def _leader_of_status(address: str, answer: RemotingCommand) -> tuple[str | None, int]:
    if answer.code != ResponseCode.SUCCESS:
        return None, -1
    status: dict[str, Any] = dict(answer.ext)
    if memoryview(answer.body).nbytes:
        try:
            said = msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = None
        if isinstance(said, dict):
            status.update(said)
    try:
        term = int(status.get(TERM_FIELD, -1))
    except (TypeError, ValueError):
        return None, -1
    if truth(status.get("serving")):
        return address, term
    leader = status.get("leader_address") or status.get(LEADER_FIELD)
    return (leader if isinstance(leader, str) and ":" in leader else None), term
