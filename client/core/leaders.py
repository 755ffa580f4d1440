"""Finds the leader of a broker group, and asks it.

When the known leader does not answer, or denies that it leads, all members and a NameServer are
asked at the same time; all tasks of a client share one search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import trio

from dledger.client.core.client_state import Announcements, ClientCounters
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    RequestFailedError,
    RequestTimedOutError,
    refusal,
)
from dledger.client.core.links import Link, Links, truth
from dledger.client.core.retry import (
    FailureKind,
    RetryPolicy,
    RetrySchedule,
    Where,
    failure_of_answer,
    retry_after_s,
)
from dledger.client.core.route import LeaderTable
from dledger.client.core.routes import Routes
from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.outcome import (
    DECISION_FIELD,
    LEADER_FIELD,
    TERM_FIELD,
    outcome_of,
)
from dledger.remoting.seams import Clock

LATE_READ_RETRIES: Final = 1_000_000
"""Reads change nothing: they are repeated until the deadline, however often."""
_READ_POLICY: Final = RetryPolicy(max_retries=LATE_READ_RETRIES)

SEARCH_S: Final = 0.25
"""One round of asking all members of a group for the leader; a silent one must not hold it up."""
PATIENCE: Final = 8
"""A search waits after a fruitless one for this part of the time since the first of them. So a
group without a majority is not besieged, and its leader is found an eighth later at most."""
PAUSE_S_MAX: Final = 1.0
"""And no longer than this, however long there has been no leader."""


@dataclass(slots=True)
class _Fruitless:
    """Searches in a row that found no leader."""

    since_s: float
    not_before_s: float


class _Failed(NamedTuple):
    """The leader that failed last."""

    address: str | None
    term: int
    routed: str | None = None
    """What the route named then, if a hint was followed: it is older than the hint, and followed
    without a pause it may name the failed one again, without an end."""


@dataclass(eq=False, repr=False)
class LeaderSearch:
    """What a client instance does to find leaders.

    Args:
        _leaders: Where what is found is kept.
        _links, _routes: Where it is asked for.
        _announcements: Woken when another leader is found.
    """

    _leaders: LeaderTable
    _links: Links
    _routes: Routes
    _announcements: Announcements
    _counters: ClientCounters
    _clock: Clock
    _not_ready: dict[str, str] = field(default_factory=dict)
    # Others may name it for long.
    _failed: dict[str, _Failed] = field(default_factory=dict)
    _searches: dict[str, trio.Event] = field(default_factory=dict)
    _fruitless: dict[str, _Fruitless] = field(default_factory=dict)

    def note_refusal(self, broker_name: str, address: str, answer: RemotingCommand) -> FailureKind:
        """Learn what a refusing answer names of the leader; return what kind of failure it is."""
        leaders = self._leaders
        kind, hint, term = failure_of_answer(answer)
        if hint == address and leaders.learn(broker_name, address, term, told_by=address):
            # Elected, but it has not applied the entry of its own term yet: a matter of moments.
            self._not_ready[broker_name] = address
            return FailureKind.NOT_LEADER if kind is FailureKind.REDIRECTED else kind
        if hint and hint != address and leaders.learn(broker_name, hint, term, told_by=address):
            if kind is FailureKind.REDIRECTED:
                self._counters.redirects_by_hint += 1
            self._announcements.wake()
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
            delay_s: Longest pause once the members have answered.
            topic: Whose route is refreshed.
            failed: The address that failed; naming it again in the same term is no news. None: none
                was known; it is the one that failed last.
        """
        clock = self._clock
        until_s = clock.monotonic() + delay_s
        if failed is not None and self._not_ready.pop(broker_name, None) == failed:
            await clock.sleep(delay_s)
            return
        last = self._note_failure(broker_name, failed, failed_term)
        search = self._searches.get(broker_name)
        if search is not None:
            with trio.move_on_after(SEARCH_S):
                await search.wait()
        elif self._may_search(broker_name):
            await self._search(broker_name, topic, last)
        if not self._is_news(broker_name, last):
            await clock.sleep(max(0.0, until_s - clock.monotonic()))

    def _note_failure(self, broker_name: str, failed: str | None, failed_term: int) -> _Failed:
        last = self._failed.get(broker_name, _Failed(None, failed_term))
        if failed is None:
            return last
        if self._leaders.suspect(broker_name, failed):
            routed = self._leaders.address(broker_name)
            last = self._failed[broker_name] = _Failed(failed, failed_term, routed)
        elif last[:2] != (failed, failed_term):
            last = self._failed[broker_name] = _Failed(failed, failed_term)
        return last

    def _is_news(self, broker_name: str, failed: _Failed) -> bool:
        leaders = self._leaders
        address = leaders.address(broker_name)
        return address is not None and (
            address not in (failed.address, failed.routed)
            or leaders.term(broker_name) > failed.term
        )

    def _may_search(self, broker_name: str) -> bool:
        fruitless = self._fruitless.get(broker_name)
        if fruitless is None:
            return True
        now_s = self._clock.monotonic()
        if now_s > fruitless.not_before_s + PAUSE_S_MAX:
            # No search has run since: that was another time without a leader.
            del self._fruitless[broker_name]
            return True
        return now_s >= fruitless.not_before_s

    async def _search(self, broker_name: str, topic: str, failed: _Failed) -> None:
        begin_s = self._clock.monotonic()
        search = self._searches[broker_name] = trio.Event()
        try:
            await self._ask_all(broker_name, topic, failed)
        finally:
            del self._searches[broker_name]
            search.set()
        if self._is_news(broker_name, failed):
            self._fruitless.pop(broker_name, None)
            return
        fruitless = self._fruitless.setdefault(broker_name, _Fruitless(begin_s, begin_s))
        now_s = self._clock.monotonic()
        fruitless.not_before_s = now_s + min((now_s - fruitless.since_s) / PATIENCE, PAUSE_S_MAX)

    async def _ask_all(self, broker_name: str, topic: str, failed: _Failed) -> None:
        self._counters.leader_searches += 1
        with trio.move_on_after(SEARCH_S):
            async with trio.open_nursery() as nursery:

                def end_when_found() -> None:
                    if self._is_news(broker_name, failed):
                        nursery.cancel_scope.cancel()

                async def ask_member(address: str) -> None:
                    leader, term = await self._leader_named_by(address, broker_name)
                    # What others say of the one that failed is older than the failure.
                    if leader is not None and (leader == address or (leader, term) != failed[:2]):
                        self._leaders.learn(broker_name, leader, term, told_by=address)
                        if self._is_news(broker_name, failed):
                            self._counters.leaders_found += 1
                            self._announcements.wake()
                        end_when_found()

                async def ask_name_server() -> None:
                    try:
                        await self._routes.refresh(topic)
                    except MQError:
                        return
                    end_when_found()

                for member in self._routes.member_addresses(broker_name):
                    nursery.start_soon(ask_member, member)
                nursery.start_soon(ask_name_server)

    async def _leader_named_by(self, address: str, broker_name: str) -> tuple[str | None, int]:
        """Return the leader and its term, as a member reports; None when it does not know."""
        try:
            link = await self._links.open(address, SEARCH_S, group=broker_name)
            if not link.records:
                return None, -1  # a real RocketMQ: its NameServers know
            answer = await self._links.ask(
                address, RequestCode.RAFT_STATUS, timeout_s=SEARCH_S, group=broker_name
            )
        except (ClientError, MQError):
            return None, -1
        return _leader_of_status(address, answer)


def status_in(answer: RemotingCommand, address: str) -> dict[str, Any]:
    """Return what the member at *address* answers of its part in its group.

    Raises RequestFailedError: it cannot be read.
    """
    status: dict[str, Any] = dict(answer.ext)
    if memoryview(answer.body).nbytes:
        try:
            status.update(msgspec.json.decode(answer.body, type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailedError(
                f"raft status of {address} cannot be read: {error}", code=answer.code
            ) from error
    return status


def _leader_of_status(address: str, answer: RemotingCommand) -> tuple[str | None, int]:
    if answer.code != ResponseCode.SUCCESS:
        return None, -1
    try:
        status = status_in(answer, address)
        term = whole_number(status.get(TERM_FIELD, -1))
    except (RequestFailedError, ValueError):
        return None, -1
    if truth(status.get("serving")):
        return address, term
    leader = status.get("leader_address") or status.get(LEADER_FIELD)
    return (leader if isinstance(leader, str) and ":" in leader else None), term


@dataclass(eq=False, repr=False)
class LeaderCalls:
    """Requests to whichever node leads a group; the time-out is that of one attempt."""

    _leaders: LeaderTable
    _search: LeaderSearch
    _links: Links
    _clock: Clock
    _rpc_timeout_s: float

    async def ask(
        self,
        broker_name: str,
        code: int,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        topic: str,
        timeout_s: float = 10.0,
        attempt_timeout_s: float | None = None,
        adapt: Callable[[Link], int] | None = None,
        changes: bool = False,
        until_known: bool = False,
        policy: RetryPolicy = _READ_POLICY,
    ) -> RemotingCommand:
        """Ask the leader of a group, following hints and fail-overs, until *timeout_s* is over.

        Only for requests that may be repeated.

        Args:
            code: Request code; *adapt* may give another one for the link found.
            ext: Header fields; copied for every attempt.
            topic: Whose route is refreshed when the leader is lost.
            timeout_s: Budget over all attempts.
            attempt_timeout_s: One attempt; default: the configured RPC time-out.
            adapt: Chooses the code by what the broker understands; it may change *ext*, too.
            changes: It changes what is stored: a refusal after an attempt without an answer is
                raised as that attempt's error, which may have done it; unless it names a decision.
            until_known: An answer that the outcome is unknown counts as none.
            policy: Whether it is asked again after an attempt without an answer.
        Returns:
            The answer of a node that did not say "not leader" or "busy".
        Raises:
            BrokerUnreachableError: No broker answered.
            ClientClosedError: The instance is closed; nothing was sent.
            RequestTimedOutError: Asked, but no answer came.
            RequestFailedError: Refused to the end; its code and remark are carried.
        """
        deadline = self._clock.monotonic() + timeout_s
        attempt_s = self._rpc_timeout_s if attempt_timeout_s is None else attempt_timeout_s
        schedule = RetrySchedule(policy, deadline)
        error: ClientError | None = None
        unknown: RequestTimedOutError | None = None
        pause_s = 0.0
        while True:
            address = self._leaders.address(broker_name)
            kind = FailureKind.NOT_LEADER
            term = self._leaders.term(broker_name)
            if address is None:
                error = BrokerUnreachableError(f"no leader of {broker_name} is known")
            else:
                left_s = max(deadline - self._clock.monotonic(), 0.001)
                try:
                    opening_s = min(self._rpc_timeout_s, left_s)
                    link = await self._links.open(address, opening_s, group=broker_name)
                    answer = await self._links.ask(
                        address,
                        code if adapt is None else adapt(link),
                        None if ext is None else dict(ext),
                        body,
                        timeout_s=min(attempt_s, left_s),
                        group=broker_name,
                    )
                except RequestTimedOutError as failed:
                    error = unknown = failed
                    kind = FailureKind.UNKNOWN
                except BrokerUnreachableError as failed:
                    error, kind = failed, FailureKind.UNREACHABLE
                except RequestFailedError as failed:
                    error, kind = failed, FailureKind.FINAL
                except ClientClosedError:
                    if unknown is None:
                        raise
                    # What an earlier attempt may have done, the closing does not undo.
                    raise unknown from None
                else:
                    is_open = until_known and outcome_of(answer) == "unknown"
                    if not is_open and answer.code not in (
                        ResponseCode.SERVICE_NOT_AVAILABLE,
                        ResponseCode.SYSTEM_BUSY,
                    ):
                        is_refused = answer.code != ResponseCode.SUCCESS
                        if changes and unknown and is_refused and DECISION_FIELD not in answer.ext:
                            raise unknown
                        return answer
                    kind = self._search.note_refusal(broker_name, address, answer)
                    pause_s = retry_after_s(answer)
                    error = refusal(address, answer)
                    if is_open:
                        assert isinstance(error, RequestTimedOutError)
                        unknown = error
            step = schedule.next(kind, self._clock.monotonic())
            if step is None:
                if unknown is None or unknown is error:
                    raise error
                # What an earlier attempt may have done, a later refusal does not undo.
                raise unknown from error
            if isinstance(error, RequestFailedError) and error.code == ResponseCode.SYSTEM_BUSY:
                await self._clock.sleep(max(step.delay_s, pause_s))
            elif step.where is not Where.NAMED_LEADER:
                await self._search.pause(
                    broker_name, step.delay_s, topic=topic, failed=address, failed_term=term
                )
