"""Both sides of one connection, on virtual time."""

import errno
import gc
from typing import Any

import pytest
import trio
import trio.testing

from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import encode_command
from dledger.remoting.write_buffer import SEND_BYTES
from tests.harness.wire_frames import ECHO, Linked, asked_with, heard, hold_in, table, until_closed

# ---------------------------------------------------------------------------------- both ways


async def test_answer_reaches_its_call(linked: Linked) -> None:
    near, _ = linked(None, table())
    answer = await near.invoke(request(ECHO, {"k": "v"}, b"body"), 1)
    assert (answer.code, answer.ext, answer.body) == (0, {"k": "v"}, b"body")
    assert near.pending_calls == 0


async def test_connections_that_wait_hold_no_frame(linked: Linked) -> None:
    def commands() -> int:
        return sum(isinstance(each, RemotingCommand) for each in gc.get_objects())

    gc.collect()
    before = commands()
    near, _ = linked(None, table())
    await near.invoke(request(ECHO, {}, b"body"), 1)
    await trio.testing.wait_all_tasks_blocked()
    assert commands() == before


async def test_both_sides_ask_over_one_connection(linked: Linked) -> None:
    async def relay(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        answer = await connection.invoke(request(77, {}, asked.body), 1)
        return response_to(asked, 0, None, {}, bytes(answer.body) + b"!")

    near, _ = linked(table(code=77), table(relay))
    answer = await near.invoke(request(ECHO, {}, b"hello"), 1)
    assert answer.body == b"hello!"


async def test_answers_may_come_in_any_order(linked: Linked, nursery: trio.Nursery) -> None:
    open_requests: list[RemotingCommand] = []
    near, far = linked(None, table(hold_in(open_requests)))
    answers: dict[int, bytes] = {}

    async def call(number: int) -> None:
        answer = await near.invoke(request(ECHO, {}, bytes([number])), 1)
        answers[number] = bytes(answer.body)

    async with trio.open_nursery() as calls:
        for number in range(5):
            calls.start_soon(call, number)
        await trio.testing.wait_all_tasks_blocked()
        assert far.in_flight == 5
        for asked in reversed(open_requests):
            assert far.reply(asked, response_to(asked, 0, None, {}, asked.body))
    assert answers == {number: bytes([number]) for number in range(5)}
    assert far.in_flight == 0


async def test_connection_that_leaves_refuses_what_comes_later(wire: Any) -> None:
    def last(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        connection.leave_soon()
        return response_to(asked)

    one = wire(table(last))
    await one.far.send_all(asked_with(1) + asked_with(2))
    first, second = await heard(one.far, 2)
    assert (first.code, second.code) == (0, 14)
    assert (second.remark, second.ext["goAway"]) == ("shutting down", "true")
    await until_closed(one.far)


async def test_opaque_wraps_to_negative_and_skips_what_is_open(wire: Any) -> None:
    one = wire()
    connection: Connection = one.connection
    connection._calls._next_opaque = 0x7FFFFFFF
    opaques = []
    for _ in range(3):
        command = request(1)
        connection.invoke_oneway(command)
        opaques.append(command.opaque)
    assert opaques == [0x7FFFFFFF, -0x80000000, -0x7FFFFFFF]


async def test_reading_stops_while_answers_are_not_taken(wire: Any) -> None:
    handled: list[int] = []

    def big(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        handled.append(asked.opaque)
        return response_to(asked, 0, None, {}, bytes(1000))

    one = wire(table(big), limits=ConnectionLimits(write_buffer_bytes=2500), lockstep=True)

    async def flood() -> None:
        for opaque in range(20):
            await one.far.send_all(asked_with(opaque))

    async with trio.open_nursery() as floods:
        floods.start_soon(flood)
        await trio.testing.wait_all_tasks_blocked()
        assert len(handled) == 3
        assert one.connection.unsent_bytes < 4000
        answers = await heard(one.far, 20)
    assert [a.opaque for a in answers] == list(range(20))


async def test_peer_that_does_not_read_is_closed(wire: Any) -> None:
    one = wire(table(), limits=ConnectionLimits(write_timeout_s=5), lockstep=True)
    await one.far.send_all(asked_with(1, body=bytes(1000)))
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(5, abs=1.5)
    assert one.connection.close_reason == "the peer does not read"


async def test_silence_longer_than_the_write_timeout_costs_no_answer(wire: Any) -> None:
    one = wire(table(), limits=ConnectionLimits(write_timeout_s=5))
    for opaque in range(3):
        await one.far.send_all(asked_with(opaque))
        assert [a.opaque for a in await heard(one.far, 1)] == [opaque]
        await trio.sleep(5 * (opaque + 1))
    assert not one.connection.is_closed


async def test_a_send_that_ends_just_when_its_time_does_costs_nothing(
    wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = wire(table(), limits=ConnectionLimits(write_timeout_s=5))
    send_all, sends = one.near.send_all, []

    async def stopped_once(data: Any) -> None:
        sends.append(len(data))
        await send_all(data)
        if len(sends) == 1:  # the machine stands still; then the send is found done, and too late
            with trio.CancelScope(shield=True):
                await trio.sleep(6)

    monkeypatch.setattr(one.near, "send_all", stopped_once)
    body = bytes(range(256)) * (3 * SEND_BYTES // 256)
    await one.far.send_all(asked_with(1, body=body))
    assert [bytes(a.body) == body for a in await heard(one.far, 1)] == [True]
    assert len(sends) > 3
    assert not one.connection.is_closed
    assert one.connection.unsent_bytes == 0


async def test_late_answers_to_a_peer_that_does_not_read_are_bounded(wire: Any) -> None:
    held: list[RemotingCommand] = []
    one = wire(
        table(hold_in(held)), limits=ConnectionLimits(max_write_buffer_bytes=10_000), lockstep=True
    )
    await one.far.send_all(b"".join(asked_with(n) for n in range(20)))
    await trio.testing.wait_all_tasks_blocked()
    sent = [one.connection.reply(a, response_to(a, 0, None, {}, bytes(1000))) for a in held]
    assert sent == [True] * 8 + [False] * 12
    await one.ended.wait()
    assert "more than it reads" in one.connection.close_reason


async def test_half_a_frame_and_then_silence_is_closed(wire: Any) -> None:
    one = wire(table(), limits=ConnectionLimits(frame_timeout_s=7))
    await one.far.send_all(asked_with(1)[:30])
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(7, abs=0.1)
    assert "half a frame" in one.connection.close_reason


async def test_frame_that_trickles_in_meets_the_same_deadline(wire: Any) -> None:
    one = wire(table(), limits=ConnectionLimits(frame_timeout_s=7))

    async def trickle() -> None:
        for byte in asked_with(1):
            await one.far.send_all(bytes([byte]))
            await trio.sleep(1)

    with pytest.raises(trio.BrokenResourceError):
        await trickle()
    assert trio.current_time() == pytest.approx(8, abs=1.1)


async def test_idle_connection_is_closed_and_traffic_keeps_it(wire: Any) -> None:
    one = wire(table(), limits=ConnectionLimits(idle_timeout_s=120))
    for opaque in range(3):
        await trio.sleep(100)
        await one.far.send_all(asked_with(opaque))
        await heard(one.far, 1)
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(420, abs=1)
    assert one.connection.close_reason == "idle"


async def test_what_we_send_counts_as_traffic_too(wire: Any) -> None:
    one = wire(limits=ConnectionLimits(idle_timeout_s=120))
    await trio.sleep(100)
    one.connection.invoke_oneway(request(40))
    await trio.sleep(100)
    assert not one.ended.is_set()
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(220, abs=1)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 20, b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00\x00\x00" + b"\x00" * 20]
)
async def test_garbage_ends_the_connection(wire: Any, garbage: bytes) -> None:
    one = wire(table())
    await one.far.send_all(garbage)
    await one.ended.wait()
    assert one.connection.close_reason.startswith("protocol error")
    assert one.near.sends == []


@pytest.mark.parametrize("answered_after_s", [0, 30])
async def test_requests_before_garbage_are_answered(wire: Any, answered_after_s: float) -> None:
    async def slow(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(answered_after_s)
        return response_to(asked, 0)

    one = wire(table(slow))
    await one.far.send_all(asked_with(1) + b"\xff" * 8)
    [answer] = await heard(one.far, 1)
    assert answer.opaque == 1
    await one.ended.wait()


async def test_answers_reach_a_peer_that_has_stopped_sending(wire: Any) -> None:
    one = wire(table())
    await one.far.send_all(asked_with(1))
    await one.far.inner.send_eof()
    assert len(await heard(one.far, 1)) == 1
    await one.ended.wait()


# ---------------------------------------------------------------------------------- response table


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.hunt)])
async def test_timed_out_calls_leave_nothing_behind(wire: Any, rounds: int) -> None:
    """Up to 100,000 calls time out: the table is empty after it, late answers find no caller."""
    one = wire(limits=ConnectionLimits(write_buffer_bytes=1 << 30, max_pending_calls=100_000))
    timed_out = 0

    async def call() -> None:
        nonlocal timed_out
        try:
            await one.connection.invoke(request(1), 3)
        except RequestTimedOutError:
            timed_out += 1

    for _ in range(rounds):
        async with trio.open_nursery() as calls:
            for _ in range(1000):
                calls.start_soon(call)
        assert one.connection.pending_calls == 0
    assert timed_out == rounds * 1000
    late = [
        encode_command(RemotingCommand(0, opaque, 1)) for opaque in range(0, rounds * 1000, 997)
    ]
    await one.far.send_all(b"".join(late))
    await trio.testing.wait_all_tasks_blocked()
    assert one.connection.pending_calls == 0
    assert not one.connection.is_closed


async def test_pending_calls_are_limited(wire: Any, nursery: trio.Nursery) -> None:
    one = wire(limits=ConnectionLimits(max_pending_calls=2))
    with pytest.raises(TooManyInFlightError) as raised:  # noqa: PT012
        async with trio.open_nursery() as calls:
            for _ in range(2):
                calls.start_soon(one.connection.invoke, request(1), 60)
            await trio.testing.wait_all_tasks_blocked()
            try:
                await one.connection.invoke(request(1), 60)
            except TooManyInFlightError as error:
                calls.cancel_scope.cancel()
                refused = error
        raise refused
    assert raised.value.outcome == "not_stored"
    assert one.connection.pending_calls == 0


async def test_call_is_unknown_when_its_connection_ends(wire: Any) -> None:
    one = wire()

    async def hang_up() -> None:
        await heard(one.far, 1)
        await one.far.aclose()

    async with trio.open_nursery() as peers:
        peers.start_soon(hang_up)
        with pytest.raises(ConnectionLostError) as raised:
            await one.connection.invoke(request(1), 3)
    assert (raised.value.sent, raised.value.outcome) == (True, "unknown")


@pytest.mark.parametrize("what", ["receive_some", "send_all"])
async def test_an_error_of_the_machine_ends_one_connection(
    wire: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one = wire()

    async def fail(_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EIO, "Input/output error")

    # What is received fails with the next bytes, what is sent at once.
    monkeypatch.setattr(one.near, what, fail)
    if what == "receive_some":
        await one.far.send_all(asked_with(1))
        await one.far.send_all(asked_with(2))
    else:
        one.connection.invoke_oneway(request(1))
    with trio.fail_after(5):
        await one.ended.wait()
    with pytest.raises(ConnectionLostError, match="Input/output error"):
        one.connection.invoke_oneway(request(1))


async def test_call_is_not_stored_when_it_never_left(wire: Any, nursery: trio.Nursery) -> None:
    one = wire(lockstep=True)
    one.connection.invoke_oneway(request(1, {}, b"stuck"))
    await trio.testing.wait_all_tasks_blocked()
    lost: list[ConnectionLostError] = []

    async def call() -> None:
        try:
            await one.connection.invoke(request(1), 3)
        except ConnectionLostError as error:
            lost.append(error)

    async with trio.open_nursery() as calls:
        calls.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        one.connection.close("test")
    assert [(error.sent, error.outcome) for error in lost] == [(False, "not_stored")]


async def test_closed_connection_refuses_calls(wire: Any) -> None:
    one = wire()
    one.connection.close("test")
    await one.ended.wait()
    with pytest.raises(ConnectionLostError) as raised:
        await one.connection.invoke(request(1), 3)
    assert raised.value.sent is False
    with pytest.raises(ConnectionLostError):
        one.connection.invoke_oneway(request(1))


async def test_cancelled_call_leaves_the_table(wire: Any) -> None:
    one = wire()
    with trio.move_on_after(0):
        await one.connection.invoke(request(1), 60)
    assert one.connection.pending_calls == 0


# ---------------------------------------------------------------------------------- ending


async def test_close_callbacks_run_once_and_handlers_are_cancelled(wire: Any) -> None:
    cancelled: list[bool] = []
    closed: list[Connection] = []

    async def forever(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(True)
        raise AssertionError

    one = wire(table(forever))
    one.connection.on_close.append(closed.append)
    await one.far.send_all(asked_with(1))
    await trio.testing.wait_all_tasks_blocked()
    await one.far.aclose()
    await one.ended.wait()
    one.connection.close("again")
    assert closed == [one.connection]
    assert cancelled == [True]


async def test_draining_answers_what_is_open_and_refuses_the_rest(
    wire: Any, nursery: trio.Nursery
) -> None:
    held: list[RemotingCommand] = []
    one = wire(table(hold_in(held)))
    await one.far.send_all(asked_with(1))
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(one.connection.drain)
    await trio.testing.wait_all_tasks_blocked()
    await one.far.send_all(asked_with(2))
    [refused] = await heard(one.far, 1)
    assert (refused.opaque, refused.code, refused.ext["outcome"]) == (2, 14, "not_stored")
    assert refused.ext["goAway"] == "true"
    assert not one.connection.is_closed
    one.connection.reply(held[0], response_to(held[0]))
    [answered] = await heard(one.far, 1)
    assert answered.opaque == 1
    await one.ended.wait()
    assert one.connection.close_reason == "drained"


async def test_large_body_leaves_in_pieces_after_its_head(wire: Any) -> None:
    body = bytes(range(256)) * 3000
    one = wire(table(lambda _, asked: response_to(asked, 0, None, {}, memoryview(body))))
    await one.far.send_all(asked_with(1) + asked_with(2))
    answers = await heard(one.far, 2)
    assert [(a.opaque, bytes(a.body) == body) for a in answers] == [(1, True), (2, True)]
    assert max(len(sent) for sent in one.near.sends) <= 256 * 1024
