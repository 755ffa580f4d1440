"""A call of gRPC, and what stands behind it, in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio

from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.metrics import METHODS
from dledger.proxy.open_receives import Received


class Context:
    """A call of gRPC whose client ends it while answers are written.

    Args:
        ends_at: The write at which the call is cancelled.
    """

    def __init__(self, ends_at: int) -> None:
        self._ends_at = ends_at
        self.written: list[Any] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", "c"),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def done(self) -> bool:
        return False

    async def write(self, answer: Any) -> None:
        if len(self.written) == self._ends_at:
            raise asyncio.CancelledError
        self.written.append(answer)


class Carrier:
    """A guest whose calls end at once; *ends_late*: when their caller has been cancelled."""

    def __init__(self, *, ends_late: bool = False) -> None:
        self.started: list[tuple[Any, ...]] = []
        self._ends_late = ends_late

    async def carry(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        found = await function(*args)
        if self._ends_late:
            raise asyncio.CancelledError
        return found

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self.started.append((function, *args))


class OneReceive:
    """A service whose receives get three messages."""

    def admit(self, name: str, request: Any, caller: Caller) -> None:
        pass

    async def receive_message(
        self, request: Any, caller: Caller, received: Received | None = None
    ) -> Received:
        received = received or Received("clerks")
        received.answers = [pb.ReceiveMessageResponse() for _ in range(3)]
        received.messages = [cast(ReceivedMessage, object())]
        received.is_over.set()
        return received

    async def abandon(self, received: Received) -> None:
        raise AssertionError("carried into trio")

    async def pull_message(self, request: Any, caller: Caller) -> list[pb.PullMessageResponse]:
        return [pb.PullMessageResponse() for _ in range(3)]

    async def in_time(self, call: Any, request: Any, caller: Caller) -> Any:
        return await call(request, caller)

    @property
    def calls(self) -> Any:
        return dict.fromkeys(METHODS)


class TrioGuest:
    """Calls carried into trio from trio itself: the server's handlers run on a virtual clock."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def carry(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await function(*args)

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(function, *args)


class TrioCall:
    """A call of gRPC in trio, whose client may end it.

    Args:
        client_id: Of the client.
        time_left_s: Until the client gives it up.
        ends_at: The write at which the client ends the call; None: it reads all.
        read_s: How long it takes over each answer.
    Attributes:
        written: What the client has.
        is_whole: The call ended well.
    """

    def __init__(
        self,
        client_id: str = "c",
        *,
        time_left_s: float | None = None,
        ends_at: int | None = None,
        read_s: float = 0.0,
    ) -> None:
        self._client_id = client_id
        self._time_left_s = time_left_s
        self._ends_at = ends_at
        self._read_s = read_s
        self._scope = trio.CancelScope()
        self.written: list[Any] = []
        self.is_whole = False

    async def make(self, handler: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Make the call; return its only answer, None where it has several or was ended."""
        deadline_s = float("inf") if self._time_left_s is None else self._time_left_s
        with self._scope, trio.move_on_after(deadline_s):
            answered = await handler(request, self)
            self.is_whole = True
            return answered
        return None

    def end(self) -> None:
        """End it now, as when the client's connection breaks."""
        self._scope.cancel()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self._client_id),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self._time_left_s

    def done(self) -> bool:
        return self._scope.cancel_called

    async def write(self, answer: Any) -> None:
        if len(self.written) == self._ends_at:
            self.end()
        await trio.sleep(self._read_s)
        self.written.append(answer)
