"""The trio run in an asyncio loop, which the clients of the loop share; calls carried into it.

::

    asyncio task ── await ──► Call ── system task of trio ──► Producer.send …
         ▲                     │ cancelled: cancels the trio scope, waits for its end
         └──── future ◄────────┘
    loop.call_soon ◄── ticks of trio's guest mode, in the same thread

The run begins with the first client that is opened and ends with the last one. Code of asyncio and
of trio runs in one thread, so a synchronous method of the SDK may be called from either side.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

import trio

from dledger.client.core.errors import ClientClosedError, UnknownOutcomeError

P = ParamSpec("P")
T = TypeVar("T")

FINISH_S: Final = 5.0
"""How long the run of a closed loop may take to end; a client that is cancelled needs 1 s at most,
to unregister. After it the run is left to the garbage collector."""

IDLE_TASKS_MAX: Final = 256
"""Tasks of trio that are kept for later calls, about 2 KiB each; more calls at a time make their
own."""


class _Here(threading.local):
    guest: Guest | None = None


_here = _Here()
"""The run of this thread: trio has one a thread at most."""


class Guest:
    """A trio run in one asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the run; `_here` is free."""
        self.loop = loop
        self.held: dict[Held, None] = {}
        self.is_over = False
        self._is_ending = False
        self._users = 0
        self._calls: dict[Call, None] = {}
        self._idle: list[_Worker] = []
        self._awaited: set[trio.Event] = set()
        self._stop = trio.Event()
        self._ended: asyncio.Future[None] = loop.create_future()
        # One context for all ticks: that of the first caller would be kept alive by them.
        self._context = Context()
        self._ticks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        _here.guest = self
        try:
            self._context.run(
                trio.lowlevel.start_guest_run,
                self._main,
                run_sync_soon_threadsafe=self._tick_from_any_thread,
                run_sync_soon_not_threadsafe=self._tick_soon,
                done_callback=self._run_over,
                host_uses_signal_set_wakeup_fd=True,
            )
        except BaseException:
            _here.guest = None
            raise
        self._keeper = loop.create_task(self._keep(), name="dledger.aio")

    # ------------------------------------------------------------------------------ begin and end

    @classmethod
    async def enter(cls) -> Guest:
        """Return the run of this loop, which goes on until `leave`; start it if there is none.

        Raises:
            RuntimeError: Another loop of this thread has open clients, or trio runs here.
        """
        loop = asyncio.get_running_loop()
        while (guest := _here.guest) is not None:
            if guest.loop is not loop:
                if not guest.loop.is_closed():
                    raise RuntimeError("another event loop of this thread has open clients")
                guest.finish()
            elif guest._is_ending:
                await asyncio.wait([guest._keeper])
            else:
                break
        else:
            guest = cls(loop)
        guest._users += 1
        return guest

    async def _main(self) -> None:
        while not self._stop.is_set():
            try:
                await self._stop.wait()
            except KeyboardInterrupt:
                # Where nothing else handles the signal: out of the loop, as without a client.
                self.loop.call_soon(_interrupt)

    async def leave(self) -> None:
        """Use the run no more; the last user's call ends it, and returns when it has ended."""
        self._users -= 1
        if not self._users:
            self._is_ending = True
            self._stop.set()
            await undisturbed(self._keeper)

    async def _keep(self) -> None:
        """End the run in order when the loop cancels its tasks before it closes."""
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self._is_ending = True
            for held in reversed(list(self.held)):
                held.leave()
                await undisturbed(held.over)
            self._stop.set()
            await undisturbed(self._ended)
            raise

    def finish(self) -> None:
        """End the run of a loop that was closed with open clients. Call it in the loop's thread."""
        self._is_ending = True
        for event in self._awaited:
            event.set()
        self._stop.set()
        while not self.is_over:
            try:
                tick = self._ticks.get(timeout=FINISH_S)
            except Empty:
                _here.guest = None
                return
            tick()

    def _run_over(self, ended: object) -> None:
        self.is_over = self._is_ending = True
        _here.guest = None
        error: BaseException | None = getattr(ended, "error", None)
        for call in list(self._calls):
            call.end(None, _closed_during_call(error))
        for held in list(self.held):
            held.run_over(error)
        if not self.loop.is_closed() and not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------------------------ ticks

    def _tick_soon(self, tick: Callable[[], object]) -> None:
        self._ticks.put(tick)
        try:
            self.loop.call_soon(self._tick, context=self._context)
        except RuntimeError:
            pass  # the loop is closed: `finish` runs what is there

    def _tick_from_any_thread(self, tick: Callable[[], object]) -> None:
        self._ticks.put(tick)
        try:
            self.loop.call_soon_threadsafe(self._tick, context=self._context)
        except RuntimeError:
            pass  # likewise

    def _tick(self) -> None:
        self._ticks.get_nowait()()

    # ------------------------------------------------------------------------------ into trio

    def start(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run *function* in a task of trio that ends with the run; with the caller's contextvars.

        Raises:
            ClientClosedError: The run is over.
        """
        self._check_use()
        trio.lowlevel.spawn_system_task(function, *args, context=copy_context())

    def _check_use(self) -> None:
        if self.is_over:
            raise ClientClosedError("the client is closed; nothing was sent")
        if self is not _here.guest:
            raise RuntimeError("a client is used in the event loop that opened it, and no other")

    async def _work(self, worker: _Worker) -> None:
        """Make its call, and others after it: a task for each would cost as much as a send.

        A task that waits holds no call: that has a message with its body.
        """
        worker.task = trio.lowlevel.current_task()
        idle = self._idle

        def stop(_: object) -> trio.lowlevel.Abort:
            idle.remove(worker)
            return trio.lowlevel.Abort.SUCCEEDED

        with trio.CancelScope() as scope:
            while worker.call is not None:
                await worker.call.run(scope)
                worker.call = None
                if scope.cancel_called or len(idle) >= IDLE_TASKS_MAX:
                    return
                idle.append(worker)
                await trio.lowlevel.wait_task_rescheduled(stop)

    async def carry(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an async function of trio and return its result.

        Raises:
            BaseException: What it raises; of a group that holds one error, that error.
            UnknownOutcomeError: The run was ended during the call.
            ClientClosedError: It was over before; nothing was called.
        Cancellation: The call is cancelled in trio, and has ended there when this returns.
        """
        self._check_use()
        call = Call(self, function, args, kwargs)
        self._calls[call] = None
        if self._idle:
            worker = self._idle.pop()
            worker.call = call
            worker.task.context = copy_context()
            trio.lowlevel.reschedule(worker.task)
        else:
            trio.lowlevel.spawn_system_task(self._work, _Worker(call), context=copy_context())
        try:
            found: T = await call.result
        except asyncio.CancelledError:
            if not call.is_over:
                await undisturbed(call.cancel())
            raise
        return found

    def forget(self, call: Call) -> None:
        """Drop a call that has ended."""
        self._calls.pop(call, None)

    # ------------------------------------------------------------------------------ out of trio

    async def call_back(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an async function of asyncio from a task of trio; return its result.

        Raises:
            Exception: What it raises.
            ClientClosedError: Its task was cancelled, or the loop was closed.
        Cancellation: Its task is cancelled, and has ended when this raises.
        """

        async def call() -> T:
            return await function(*args, **kwargs)

        task = self.loop.create_task(call(), context=copy_context())
        ended = trio.Event()
        self._awaited.add(ended)
        task.add_done_callback(lambda _: ended.set())
        try:
            await ended.wait()
        except trio.Cancelled:
            if not self.loop.is_closed():
                task.cancel()
                with trio.CancelScope(shield=True):
                    await ended.wait()
            raise
        finally:
            self._awaited.discard(ended)
        if not task.done():
            raise ClientClosedError("the event loop was closed")
        if task.cancelled():
            raise ClientClosedError("the task of the function was cancelled")
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise ClientClosedError(f"the function has ended the program: {error!r}") from error
        return task.result()


class Call:
    """One call carried into trio."""

    __slots__ = (
        "_args",
        "_function",
        "_guest",
        "_is_cancelled",
        "_kwargs",
        "_over",
        "_scope",
        "is_over",
        "result",
    )

    def __init__(
        self,
        guest: Guest,
        function: Callable[..., Awaitable[object]],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._guest = guest
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._scope: trio.CancelScope | None = None
        self._over: asyncio.Future[None] | None = None
        self._is_cancelled = False
        self.result: asyncio.Future[Any] = guest.loop.create_future()
        self.is_over = False

    def cancel(self) -> asyncio.Future[None]:
        """Cancel it, and return what is set when it is over."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        self._over = self._guest.loop.create_future()
        return self._over

    async def run(self, scope: trio.CancelScope) -> None:
        """Make the call; its end is in `result`. A call that is cancelled first is not made."""
        if self._is_cancelled:
            self.end(None, None)
            return
        self._scope = scope
        try:
            found = await self._function(*self._args, **self._kwargs)
        except BaseException as raised:  # noqa: BLE001  # handed to the caller
            cancelled, error = _split(raised)
            if error is None:
                error = _closed_during_call(cancelled)
            self.end(None, error)
            if cancelled is not None:
                raise cancelled from None  # with its caller, which gets nothing of it, or the run
        else:
            self.end(found, None)

    def end(self, found: object, error: BaseException | None) -> None:
        """Give the caller its result. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        self._guest.forget(self)
        if self._guest.loop.is_closed():
            return
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        if self.result.done():
            return
        if error is None:
            self.result.set_result(found)
        else:
            self.result.set_exception(error)


class _Worker:
    """A task of trio that makes calls."""

    __slots__ = ("call", "task")

    task: trio.lowlevel.Task

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call


class Held:
    """A context manager of trio that a task of the run keeps open."""

    def __init__(self, guest: Guest, manager: AbstractAsyncContextManager[object]) -> None:
        self.over: asyncio.Future[None] = guest.loop.create_future()
        self._guest = guest
        self._manager = manager
        self._scope = trio.CancelScope()
        self._leave = trio.Event()
        self._opened: asyncio.Future[None] = guest.loop.create_future()
        self._is_open = False
        self._body_error: BaseException | None = None
        self._failure: BaseException | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._has_cancelled_owner = False

    async def open(self) -> None:
        """Open it; the task that calls this is cancelled if it breaks while it is open.

        Raises:
            Exception: What opening raises.
        Cancellation: It is closed when this raises.
        """
        self._owner = asyncio.current_task()
        self._guest.start(self._hold)
        self._guest.held[self] = None
        try:
            await self._opened
        except asyncio.CancelledError:
            self._scope.cancel()
            await undisturbed(self.over)
            raise

    def leave(self, error: Exception | None = None) -> None:
        """Let it close, as if *error* had left its block. Idempotent."""
        if not self._leave.is_set():
            self._body_error = error
            self._leave.set()

    async def close(self, error: BaseException | None = None) -> None:
        """Close it, and return when it is closed.

        Args:
            error: What leaves the block; a cancellation cancels what runs in it.
        Raises:
            Exception: What broke it while it was open, or what closing raises.
        Cancellation: Closing is cut short, and is over when this raises.
        """
        if error is None or isinstance(error, Exception):
            self.leave(error)
        else:
            self._scope.cancel()
        try:
            await asyncio.shield(self.over)
        except asyncio.CancelledError:
            if not self._has_cancelled_owner:
                self._scope.cancel()
                await undisturbed(self.over)
                raise
        if self._has_cancelled_owner:
            assert self._owner is not None
            if self._owner.uncancel():
                return  # another has cancelled it, too
        if self._failure is not None:
            if error is not None:
                raise self._failure from error
            raise self._failure

    async def _hold(self) -> None:
        try:
            with self._scope:
                async with self._manager:
                    self._is_open = True
                    self._settle(self._opened, None)
                    await self._leave.wait()
                    if self._body_error is not None:
                        raise self._body_error
        except BaseException as raised:  # noqa: BLE001  # handed to the task that opened it
            cancelled, error = _split(raised)
            if raised is self._body_error:
                self._end(None)
            else:  # a cancellation that is not its own scope's: the run ends
                self._end(_closed_during_call(cancelled) if error is None else error)
        else:
            self._end(None)

    def run_over(self, error: BaseException | None) -> None:
        """End it with the run, whose tasks do not run any more."""
        self._end(_closed_during_call(error))

    def _end(self, failure: BaseException | None) -> None:
        guest = self._guest
        if self not in guest.held:
            return  # it has ended before
        del guest.held[self]
        self._failure = failure
        if guest.loop.is_closed():
            return
        if not self._is_open:
            self._settle(self._opened, failure)
        elif failure is not None and not self._leave.is_set() and self._owner is not None:
            self._has_cancelled_owner = self._owner.cancel()
        self._settle(self.over, None)

    @staticmethod
    def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
        if future.done() or future.get_loop().is_closed():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


async def undisturbed(future: asyncio.Future[Any]) -> None:
    """Wait for the end of *future*; a cancellation meanwhile is the caller's to repeat."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            pass


def single(error: BaseException) -> BaseException:
    """Return the only error that a group of groups holds; *error* itself if it holds more. Pure."""
    found = error
    while isinstance(found, BaseExceptionGroup):
        if len(found.exceptions) != 1:
            return error
        found = found.exceptions[0]
    return found


def _split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return the cancellations in *error*, and what else is in it. Pure."""
    if isinstance(error, BaseExceptionGroup):
        cancelled, rest = error.split(trio.Cancelled)
        return cancelled, None if rest is None else single(rest)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)


def _closed_during_call(cause: BaseException | None) -> UnknownOutcomeError:
    error = UnknownOutcomeError("the client was closed during the call; what it sent may be stored")
    error.__cause__ = cause
    return error


def _interrupt() -> None:
    raise KeyboardInterrupt


def _finish_at_exit() -> None:
    """End the run of a loop that was closed with open clients, if nothing else has."""
    guest = _here.guest
    if guest is not None and guest.loop.is_closed():
        guest.finish()


atexit.register(_finish_at_exit)
