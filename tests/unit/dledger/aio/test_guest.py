"""Calls carried from asyncio into trio: results, cancellation, contexts, and ends of loops."""

import asyncio
import contextlib
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dledger.aio.guest import Call, Guest, Held
from dledger.client.core.errors import ClientClosedError

WHO: ContextVar[str] = ContextVar("who", default="none")


@asynccontextmanager
async def entered() -> AsyncIterator[Guest]:
    guest = await Guest.enter()
    try:
        yield guest
    finally:
        await guest.leave()


@pytest.fixture(autouse=True)
def _threads_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test leaves no thread; those of trio that wait for work end sooner than usual."""
    before = set(threading.enumerate())
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.01)
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


# ---------------------------------------------------------------------------------- results


def test_guest_returns_results_and_raises_errors() -> None:
    async def add(a: int, *, b: int) -> int:
        await trio.sleep(0)
        return a + b

    async def fail(levels: int) -> None:
        await trio.sleep(0)
        if not levels:
            raise KeyError("one")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, levels - 1)

    async def fail_twice() -> None:
        raise ExceptionGroup("two", [KeyError("one"), ValueError("other")])

    async def main() -> None:
        async with entered() as guest:
            assert await guest.carry(add, 1, b=2) == 3
            assert await asyncio.gather(*(guest.carry(add, n, b=n) for n in range(600))) == [
                2 * n for n in range(600)
            ]
            for levels in range(3):
                with pytest.raises(KeyError, match="one"):
                    await guest.carry(fail, levels)
            with pytest.raises(ExceptionGroup) as raised:
                await guest.carry(fail_twice)
            assert len(raised.value.exceptions) == 2
        with pytest.raises(ClientClosedError, match="nothing was sent"):
            await guest.carry(add, 1, b=2)

    asyncio.run(main())


def test_guest_holds_nothing_of_calls_that_have_ended() -> None:
    class Body:
        """What a request or an answer holds."""

    async def give_back(body: Body) -> Body:
        await trio.sleep(0)
        return body

    async def main() -> None:
        async with entered() as guest:
            bodies = [Body() for _ in range(3)]
            held = [weakref.ref(body) for body in bodies]
            await asyncio.gather(*(guest.carry(give_back, body) for body in bodies))
            bodies.clear()
            await asyncio.sleep(0)
            assert [body() for body in held] == [None] * 3

    asyncio.run(main())


def test_guest_is_shared_and_ends_with_its_last_user() -> None:
    async def main() -> None:
        async with entered() as first:
            async with entered() as second:
                assert first is second
            await first.carry(trio.sleep, 0)
            assert asyncio.all_tasks() - {asyncio.current_task()}
        assert first.is_over
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with entered() as third:
            assert third is not first
            await third.carry(trio.sleep, 0)

    asyncio.run(main())
    asyncio.run(main())


def test_guest_keeps_contextvars_both_ways() -> None:
    async def in_trio(guest: Guest) -> list[str]:
        await trio.sleep(0)
        return [WHO.get(), await guest.call_back(in_asyncio)]

    async def in_asyncio() -> str:
        await asyncio.sleep(0)
        return WHO.get()

    async def call(guest: Guest, name: str) -> list[str]:
        WHO.set(name)
        return await guest.carry(in_trio, guest)

    async def main() -> None:
        async with entered() as guest:
            for _ in range(2):  # the second time by tasks that were used before
                found = await asyncio.gather(*(call(guest, f"u{n}") for n in range(20)))
                assert found == [[f"u{n}", f"u{n}"] for n in range(20)]
            assert await guest.carry(in_trio, guest) == ["none", "none"]

    asyncio.run(main())


# ---------------------------------------------------------------------------------- cancellation


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Work:
    """A function of trio with a known number of checkpoints, and what became of it."""

    def __init__(self, checkpoints: int, cleanup: int) -> None:
        self.checkpoints = checkpoints
        self.cleanup = cleanup
        self.running = 0
        self.ended: list[str] = []

    async def begun(self) -> None:
        """Return when it has begun: trio may have to be woken first."""
        while not (self.running or self.ended):
            await asyncio.sleep(0)

    async def run(self) -> str:
        self.running += 1
        try:
            for _ in range(self.checkpoints):
                await trio.lowlevel.checkpoint()
            self.ended.append("whole")
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                for _ in range(self.cleanup):
                    await trio.lowlevel.checkpoint()
            self.ended.append("cancelled")
            raise
        finally:
            self.running -= 1
        return "result"


LONG = 3_000
"""Checkpoints of trio, far more than the turns of the loop before a cancellation."""


def check_cancelled_after(wait: int, work: Work, *, has_begun: bool = True) -> None:
    """Cancel *work* after *wait* turns of the loop: it must have ended when its caller goes on.

    The turns are counted from its beginning in trio, or from the call.
    """

    async def main() -> None:
        async with entered() as guest:
            task = asyncio.create_task(guest.carry(work.run))
            if has_begun:
                await work.begun()
            await turns(wait)
            task.cancel()
            try:
                assert await task == "result"
                assert work.ended == ["whole"]
            except asyncio.CancelledError:
                assert task.cancelled()
            assert work.running == 0
            if work.checkpoints == LONG:
                assert work.ended in ([], ["cancelled"])
            # What was cancelled has no effect on the next call.
            assert await guest.carry(Work(1, 0).run) == "result"

    asyncio.run(main())


@given(
    wait=st.integers(0, 60),
    checkpoints=st.sampled_from([0, 1, 2, 5, 20, LONG]),
    cleanup=st.integers(0, 5),
)
def test_cancellation_at_any_moment_ends_the_call(
    wait: int, checkpoints: int, cleanup: int
) -> None:
    check_cancelled_after(wait, Work(checkpoints, cleanup))


def test_cancellation_check_finds_a_call_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the caller is cancelled, the call in trio is not."""

    def cancel(call: Call) -> asyncio.Future[None]:
        call._over = call._guest.loop.create_future()
        return call._over

    monkeypatch.setattr(Call, "cancel", cancel)
    with pytest.raises(AssertionError, match="whole"):
        check_cancelled_after(10, Work(LONG, 0))


def test_cancellation_check_finds_a_caller_that_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted bug: the call is cancelled, and its caller goes on before it has ended."""

    async def at_once(_: object) -> None:
        return

    monkeypatch.setattr("dledger.aio.guest.undisturbed", at_once)

    async def main() -> None:
        guest = await Guest.enter()
        work = Work(LONG, 50)
        task = asyncio.create_task(guest.carry(work.run))
        await work.begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.running == 0

    with pytest.raises(AssertionError):
        asyncio.run(main())
    monkeypatch.undo()


def test_cancellation_that_repeats_waits_all_the_same() -> None:
    work = Work(LONG, 40)

    async def main() -> None:
        async with entered() as guest:
            task = asyncio.create_task(guest.carry(work.run))
            await work.begun()
            for _ in range(5):
                task.cancel()
                await turns(3)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (work.running, work.ended) == (0, ["cancelled"])

    asyncio.run(main())


def test_guest_times_out_as_asyncio_does() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("ended")

    async def main() -> None:
        async with entered() as guest:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await guest.carry(wait)
            assert ended == ["ended"]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(guest.carry(wait), 0.01)
            assert ended == ["ended"] * 2
            assert asyncio.current_task() is not None
            async with asyncio.timeout(10):
                await guest.carry(trio.sleep, 0)

    asyncio.run(main())


def test_call_back_is_cancelled_and_awaited() -> None:
    ended: list[str] = []
    begun = asyncio.Event()

    async def listen() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            ended.append("listener")

    async def in_trio(guest: Guest) -> None:
        try:
            await guest.call_back(listen)
        finally:
            ended.append("trio")

    async def main() -> None:
        async with entered() as guest:
            task = asyncio.create_task(guest.carry(in_trio, guest))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ended == ["listener", "trio"]

    asyncio.run(main())


def test_call_back_that_is_cancelled_is_an_error() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def broken() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with entered() as guest:
            with pytest.raises(ClientClosedError, match="was cancelled"):
                await guest.carry(guest.call_back, cancelled)
            with pytest.raises(ZeroDivisionError):
                await guest.carry(guest.call_back, broken)

    asyncio.run(main())


# ---------------------------------------------------------------------------------- scopes


class Scope:
    """A scope of trio that records what happens to it."""

    def __init__(self, seen: list[str], name: str = "", fail: trio.Event | None = None) -> None:
        self.seen = seen
        self.name = name
        self.fail = fail

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await trio.sleep(0)
        async with trio.open_nursery() as nursery:
            if self.fail is not None:
                nursery.start_soon(self._fail, self.fail)
            self.seen.append("open" + self.name)
            try:
                yield
                self.seen.append("left" + self.name)
            except ZeroDivisionError:
                self.seen.append("error" + self.name)
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(0)
                self.seen.append("closed" + self.name)
                nursery.cancel_scope.cancel()

    async def _fail(self, event: trio.Event) -> None:
        await event.wait()
        raise LookupError("broken inside")


def test_held_scope_sees_how_its_block_is_left() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        async with entered() as guest:
            for error in (None, ZeroDivisionError(), asyncio.CancelledError()):
                held = Held(guest, Scope(seen).open())
                await held.open()
                try:
                    await held.close(error)
                except ZeroDivisionError:
                    seen.append("raised")
        return seen

    assert asyncio.run(main()) == [
        *("open", "left", "closed"),
        *("open", "error", "closed", "raised"),
        *("open", "closed"),
    ]


@given(st.integers(0, 25))
def test_held_scope_that_is_cancelled_while_it_opens(wait: int) -> None:
    seen: list[str] = []

    async def main() -> None:
        async with entered() as guest:
            held = Held(guest, Scope(seen).open())
            task = asyncio.create_task(held.open())
            await turns(wait)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                assert held.over.done() or not seen
            else:
                assert seen == ["open"]
                await held.close()
            assert seen.count("open") == seen.count("closed")

    asyncio.run(main())


def test_held_scope_that_breaks_cancels_its_owner() -> None:
    seen: list[str] = []

    async def main() -> None:
        async with entered() as guest:
            fail = trio.Event()
            held = Held(guest, Scope(seen, fail=fail).open())
            await held.open()
            fail.set()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await asyncio.sleep(1000)
            with pytest.raises(LookupError, match="broken inside"):
                await held.close(cancelled.value)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["open", "closed"]


def test_held_scope_that_cannot_open_raises_why() -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[None]:
        await trio.sleep(0)
        raise LookupError("no")
        yield

    async def main() -> None:
        async with entered() as guest:
            held = Held(guest, never())
            with pytest.raises(LookupError):
                await held.open()

    asyncio.run(main())


# ---------------------------------------------------------------------------------- ends of loops


def test_loop_that_ends_closes_what_is_open_in_order() -> None:
    seen: list[str] = []

    async def main() -> None:
        guest = await Guest.enter()
        for name in ("1", "2", "3"):
            await Held(guest, Scope(seen, name).open()).open()

    asyncio.run(main())
    assert seen == [
        *("open1", "open2", "open3"),
        *("left3", "closed3", "left2", "closed2", "left1", "closed1"),
    ]


async def forever(seen: list[str]) -> None:
    try:
        await trio.sleep_forever()
    finally:
        seen.append("ended")


@pytest.mark.parametrize("is_waiting", [True, False])
def test_loop_that_is_closed_lets_the_next_one_begin(is_waiting: bool) -> None:
    seen: list[str] = []

    async def main() -> None:
        guest = await Guest.enter()
        guest.start(forever, seen)
        await Held(guest, Scope(seen).open()).open()
        if is_waiting:
            await asyncio.sleep(0.01)  # trio waits in its thread, or a tick is on its way

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what is tested
    loop.close()

    async def again() -> None:
        async with entered() as guest:
            await guest.carry(trio.sleep, 0)

    asyncio.run(again())
    assert sorted(seen) == ["closed", "ended", "open"]


def test_other_loop_of_the_thread_is_refused_meanwhile() -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def use(guest: Guest) -> None:
        await guest.carry(trio.sleep, 0)

    with contextlib.closing(first), contextlib.closing(second):
        guest = first.run_until_complete(Guest.enter())
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run_until_complete(Guest.enter())
        first.run_until_complete(use(guest))
        first.run_until_complete(guest.leave())
        other = second.run_until_complete(Guest.enter())
        second.run_until_complete(use(other))
        second.run_until_complete(other.leave())


def test_guests_of_two_threads_do_not_meet() -> None:
    def run() -> None:
        async def main() -> None:
            async with entered() as guest:
                found.append(guest)
                await guest.carry(trio.sleep, 0.01)

        asyncio.run(main())

    found: list[Guest] = []
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found)) == 3
    assert all(guest.is_over for guest in found)


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """A run in the background of a shell begins with a signal that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


def interrupted(run: Callable[[Awaitable[None]], None]) -> list[str]:
    seen: list[str] = []

    async def main() -> None:
        guest = await Guest.enter()
        await Held(guest, Scope(seen).open()).open()
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await guest.carry(trio.sleep_forever)

    with pytest.raises(KeyboardInterrupt):
        run(main())
    return seen


@pytest.mark.usefixtures("default_interrupt")
def test_keyboard_interrupt_ends_asyncio_run() -> None:
    assert interrupted(asyncio.run) == ["open", "left", "closed"]  # type: ignore[arg-type]


@pytest.mark.usefixtures("default_interrupt")
def test_keyboard_interrupt_ends_a_bare_loop() -> None:
    with asyncio.Runner() as runner:  # closes the loop with its tasks, as programs do
        loop = runner.get_loop()
        seen = interrupted(loop.run_until_complete)
        assert seen == ["open"]
    assert seen == ["open", "left", "closed"]
