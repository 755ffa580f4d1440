"""Methods of the SDK's classes as methods of their asyncio classes: same signature, same docstring.

A class of `dledger.aio` holds an object of the class it is named after. ``send =
carried(Producer.send)`` makes a method that calls `Producer.send` of that object in trio;
``passed`` and ``iterated`` do the same for plain methods and for async generators. Nothing is
written twice: the signature is taken over by the type checker, too.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import trio

from dledger.aio.guest import Guest, Held
from dledger.client.core.client_state import SameCall
from dledger.client.core.errors import ClientClosedError

P = ParamSpec("P")
T = TypeVar("T")
I_co = TypeVar("I_co", covariant=True)


class Face(Generic[I_co]):
    """An object of the SDK, used from asyncio."""

    _inner: I_co
    _client: Face[Any]

    def _guest(self) -> Guest:
        """Return the run that calls are carried into.

        Raises:
            ClientClosedError: The client is not open.
        """
        return self._client._guest()


def carried(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> SameCall[P, Coroutine[Any, Any, T]]:
    """Return an asyncio method that awaits *method* in trio."""

    @functools.wraps(method)
    async def call(self: Face[Any], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._guest().carry(method, self._inner, *args, **kwargs)

    return cast("SameCall[P, Coroutine[Any, Any, T]]", call)


def passed(method: Callable[Concatenate[Any, P], T]) -> SameCall[P, T]:
    """Return a method that calls the plain *method*: it runs in the same thread as trio."""

    @functools.wraps(method)
    def call(self: Face[Any], *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._inner, *args, **kwargs)

    return cast("SameCall[P, T]", call)


def iterated(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> SameCall[P, AsyncIterator[T]]:
    """Return an async generator of asyncio that yields what *method* yields in trio.

    One item is fetched ahead. Leave a loop that ends early by ``contextlib.aclosing``.
    """

    @functools.wraps(method)
    async def iterate(self: Face[Any], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        guest = self._guest()
        items = cast("AsyncGenerator[T]", method(self._inner, *args, **kwargs))
        put, taken = trio.open_memory_channel[tuple[T, None] | tuple[None, Exception]](0)
        held = Held(guest, _fetching(items, put))
        await held.open()
        try:
            while True:
                try:
                    item, error = await guest.carry(taken.receive)
                except trio.EndOfChannel:
                    return
                if error is not None:
                    raise error
                yield cast("T", item)
        finally:
            await held.close()

    return cast("SameCall[P, AsyncIterator[T]]", iterate)


@asynccontextmanager
async def _fetching(
    items: AsyncGenerator[T], put: trio.MemorySendChannel[tuple[T, None] | tuple[None, Exception]]
) -> AsyncIterator[None]:
    """Send *items*, and the error that ends them, to *put* while it is open."""

    async def fetch() -> None:
        async with put, aclosing(items):
            try:
                async for item in items:
                    await put.send((item, None))
            except Exception as error:  # noqa: BLE001  # handed to the caller
                await put.send((None, error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        yield
        nursery.cancel_scope.cancel()


def all_carried(kind: type[Any]) -> type[Any]:
    """Return a class with every method and property of *kind*, whose methods are all async."""
    members: dict[str, object] = {}
    for name in dir(kind):
        found = getattr(kind, name)
        if name.startswith("_"):
            continue
        if isinstance(found, property):
            members[name] = property(operator.attrgetter(f"_inner.{name}"), doc=found.__doc__)
        else:
            is_generator = inspect.isasyncgenfunction(found)
            members[name] = iterated(found) if is_generator else carried(found)
    return type(kind.__name__, (), members)


class ScopedFace(Face[I_co]):
    """An object of the SDK that is open inside ``async with``."""

    _held: Held | None = None

    async def __aenter__(self) -> Self:
        if self._held is not None:
            raise ClientClosedError(f"a {type(self).__name__} is opened once")
        manager = cast("AbstractAsyncContextManager[object]", self._inner)
        held = Held(self._guest(), manager)
        await held.open()
        self._held = held
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._held is not None
        await self._held.close(error)


class _OfGroup(Protocol):
    group: str


G_co = TypeVar("G_co", bound=_OfGroup, covariant=True)


class GroupFace(ScopedFace[G_co]):
    """A producer or a consumer of a group."""

    @property
    def group(self) -> str:
        """The producer group, or the consumer group."""
        return self._inner.group


def in_loop(
    guest: Callable[[], Guest], function: Callable[P, Awaitable[T]]
) -> Callable[P, Awaitable[T]]:
    """Return an async function for trio that calls *function*, of the user, in the asyncio loop."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await guest().call_back(function, *args, **kwargs)

    return call


def is_async(function: Callable[..., object]) -> bool:
    """Tell whether *function* is an async one, or an object that is called like one. Pure."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
