"""What the parts of a client share: counters, announcements, and how each of them is opened."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, overload

import trio

from dledger.client.core.broker_requests import CheckBacks, OpenRequests
from dledger.client.core.errors import ClientClosedError

P = ParamSpec("P")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True)
class ClientCounters:
    """What the instance has done so far; for tests and people.

    Attributes:
        route_refreshes: Routes asked of a NameServer.
        redirects_by_hint: Requests that followed the leader a "not leader" answer named.
        leader_searches: Rounds in which all members of a group were asked.
        leaders_found: Of these, those in which a member named another leader than before.
    """

    route_refreshes: int = 0
    redirects_by_hint: int = 0
    leader_searches: int = 0
    leaders_found: int = 0
    heartbeats: int = 0


class Announcements:
    """What makes the next heartbeat due, and the groups that are woken by changes.

    Attributes:
        due: Set when a broker may have to know something now.
        watchers: Of groups that share queues: called when members or queues may have changed.
    """

    def __init__(self, check_backs: CheckBacks, requests: OpenRequests) -> None:
        self.due = trio.Event()
        self.watchers: dict[str, Callable[[], None]] = {}
        self._check_backs = check_backs
        self._requests = requests

    def wake(self) -> None:
        """Let brokers that do not know the newest know it now."""
        self.due.set()

    def group_changed(self, group: str) -> None:
        """Wake those that share the queues of *group*: its members have changed."""
        if (watcher := self.watchers.get(group)) is not None:
            watcher()

    def routes_changed(self) -> None:
        """Announce this client to new brokers, and wake those that share queues."""
        self.wake()
        for watcher in self.watchers.values():
            watcher()

    def connection_ended(self) -> None:
        """Connect again at once, where a broker that does not know this client does it harm."""
        if self.is_awaited:
            self.wake()

    def expect_replies(self) -> bool:
        """Let all brokers know this client from now on; return whether that is new."""
        is_new = not self._requests.in_use
        self._requests.in_use = True
        return is_new

    @property
    def is_awaited(self) -> bool:
        """Whether brokers that do not know this client do it harm: by its group, or its replies."""
        return bool(self.watchers) or self._requests.in_use

    @property
    def is_asked(self) -> bool:
        """Whether any member of a group, as its next leader, may have to reach this client."""
        return bool(self._check_backs) or self._requests.in_use


class ManagedScope:
    """Lets a class be written as one ``@asynccontextmanager`` method and used by ``async with``."""

    _manager: AbstractAsyncContextManager[None] | None = None

    def _scope(self) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        if self._manager is not None:
            raise ClientClosedError(f"a {type(self).__name__} is opened once")
        self._manager = self._scope()
        await self._manager.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._manager is not None
        if not isinstance(error, Exception):
            return await self._manager.__aexit__(kind, error, trace)
        # The nurseries inside would wrap the caller's error in groups; it is to come out as it is.
        try:
            await self._manager.__aexit__(_BodyFailed, _BodyFailed(), None)
        except _BodyFailed:
            return False
        except BaseExceptionGroup as group:
            rest = group.split(_BodyFailed)[1]
            if rest is not None:
                raise rest from error
        return False


class _BodyFailed(Exception):  # noqa: N818  # never seen outside
    """Stands for the error of the caller's block while a scope closes."""


def part_of(
    part: str, method: Callable[Concatenate[Any, P], Awaitable[T]]
) -> SameCall[P, Coroutine[Any, Any, T]]:
    """Return a method that awaits *method* of the object in the attribute *part*."""

    @functools.wraps(method)
    async def call(self: object, *args: P.args, **kwargs: P.kwargs) -> T:
        return await method(getattr(self, part), *args, **kwargs)

    return cast("SameCall[P, Coroutine[Any, Any, T]]", call)


class SameCall(Protocol[P, R_co]):
    """A method with the signature and the docstring of another one."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Callable[..., R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Callable[P, R_co]: ...
