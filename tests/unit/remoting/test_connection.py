"""Both sides of one connection, on virtual time."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from commitlog.errors import DiskFullError, InvariantBroken
from remoting.connection import Connection
from remoting.connection_limits import ConnectionLimits
from remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from remoting.processor import DEFERRED, Limiter
from remoting.processor_table import ProcessorTable
from remoting.protocol.command import (
    RemotingCommand,
    SerializeType,
    request,
    response_to,
)
from remoting.protocol.frame import FrameDecoder, encode_command
from remoting.write_buffer import SEND_BYTES

Linked = Callable[..., tuple[Connection, Connection]]
ECHO = 900


def echo(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, 0, None, dict(asked.ext), asked.body)


def hold_in(held: list[RemotingCommand]) -> Any:
    """A handler that answers nothing and keeps what it was asked."""

    def hold(_: Connection, asked: RemotingCommand) -> Any:
        held.append(asked)
        return DEFERRED

    return hold


def table(handler: Any = echo, *, code: int = ECHO, limit: int = 100) -> ProcessorTable:
    processors = ProcessorTable()
    processors.register(code, handler, Limiter("test", limit))
    return processors


def asked_with(opaque: int, code: int = ECHO, **fields: Any) -> bytes:
    command = request(code, **fields)
    command.opaque = opaque
    return encode_command(command)


async def heard(stream: Any, count: int) -> list[RemotingCommand]:
    decoder = FrameDecoder()
    commands: list[RemotingCommand] = []
    while len(commands) < count:
        data = await stream.receive_some(65536)
        assert data, "the connection ended"
        commands += decoder.feed(data)
    return commands


async def until_closed(stream: Any) -> None:
    while await stream.receive_some(65536):
        pass


# ---------------------------------------------------------------------------------- both ways


async def test_answer_reaches_its_call(linked: Linked) -> None:
    near, _ = linked(None, table())
    answer = await near.invoke(request(ECHO, {"k": "v"}, b"body"), 1)
    assert (answer.code, answer.ext, answer.body) == (0, {"k": "v"}, b"body")
    assert near.pending_calls == 0


async def test_both_sides_ask_over_one_connection(linked: Linked) -> None:
    async def relay(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        answer = await connection.invoke(request(77, {}, asked.body), 1)
        return response_to(asked, 0, None, {}, bytes(answer.body) + b"!")

    near, _ = linked(table(code=77), table(relay))
    answer = await near.invoke(request(ECHO, {}, b"hello"), 1)
    assert answer.body == b"hello!"


def failing(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    raise DiskFullError("full")


async def echo_later(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
    await trio.sleep(1)
    return echo(connection, asked)


def echo_deferred(connection: Connection, asked: RemotingCommand) -> Any:
    connection.reply(asked, echo(connection, asked))
    return DEFERRED


@pytest.mark.parametrize("handler", [echo, failing, echo_later, echo_deferred])
@pytest.mark.parametrize("is_oneway", [False, True])
async def test_an_answer_is_noted_however_it_is_given(
    linked: Linked, handler: Any, is_oneway: bool
) -> None:
    noted: list[int] = []

    def watched(connection: Connection, asked: RemotingCommand) -> Any:
        connection.when_answered(asked, lambda response: noted.append(response.code))
        return handler(connection, asked)

    near, _ = linked(None, table(watched))
    if is_oneway:
        near.invoke_oneway(request(ECHO))
        await trio.sleep(2)
    else:
        await near.invoke(request(ECHO), 5)
    assert len(noted) == 1
    assert (noted[0] == 0) == (handler is not failing)


async def test_an_answer_is_noted_after_the_connection_ended(linked: Linked) -> None:
    held: list[RemotingCommand] = []
    noted: list[int] = []

    def watched(connection: Connection, asked: RemotingCommand) -> Any:
        connection.when_answered(asked, lambda response: noted.append(response.code))
        return hold_in(held)(connection, asked)

    near, far = linked(None, table(watched))
    near.invoke_oneway(request(ECHO))
    await trio.testing.wait_all_tasks_blocked()
    far.close("the peer has closed")
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(2):
        assert not far.reply(held[0], response_to(held[0]))
    assert noted == [0]


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


async def test_second_reply_to_a_request_is_not_sent(wire: Any) -> None:
    held: list[RemotingCommand] = []
    one = wire(table(hold_in(held)))
    await one.far.send_all(asked_with(1))
    await trio.testing.wait_all_tasks_blocked()
    assert one.connection.reply(held[0], response_to(held[0])) is True
    assert one.connection.reply(held[0], response_to(held[0])) is False
    assert len(await heard(one.far, 1)) == 1
    assert one.connection.unsent_bytes == 0


async def test_reply_inside_the_handler_counts(linked: Linked) -> None:
    def at_once(connection: Connection, asked: RemotingCommand) -> Any:
        connection.reply(asked, response_to(asked, 7))
        return DEFERRED

    near, far = linked(None, table(at_once))
    assert (await near.invoke(request(ECHO), 1)).code == 7
    assert far.in_flight == 0


@pytest.mark.parametrize("handler", [echo, failing, echo_deferred])
async def test_a_held_answer_leaves_at_its_time(
    linked: Linked, handler: Any, autojump_clock: trio.testing.MockClock
) -> None:
    def held(connection: Connection, asked: RemotingCommand) -> Any:
        connection.hold_answer(asked, 0.7)
        return handler(connection, asked)

    near, far = linked(None, table(held))
    began_s = trio.current_time()
    answer = await near.invoke(request(ECHO, {}, b"body"), 5)
    assert trio.current_time() - began_s == pytest.approx(0.7)
    assert (answer.code == 0) == (handler is not failing)
    assert far.in_flight == 0


async def test_an_answer_later_than_its_hold_is_not_delayed(
    linked: Linked, autojump_clock: trio.testing.MockClock
) -> None:
    async def held(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        connection.hold_answer(asked, 0.7)
        return await echo_later(connection, asked)

    near, far = linked(None, table(held))
    began_s = trio.current_time()
    await near.invoke(request(ECHO), 5)
    assert trio.current_time() - began_s == pytest.approx(1.0)
    assert far.in_flight == 0


async def test_a_second_answer_to_a_held_request_is_not_sent(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    given: list[bool] = []

    def twice(connection: Connection, asked: RemotingCommand) -> Any:
        connection.hold_answer(asked, 1)
        given.append(connection.reply(asked, response_to(asked, 7)))
        given.append(connection.reply(asked, response_to(asked, 8)))
        return DEFERRED

    one = wire(table(twice))
    await one.far.send_all(asked_with(1))
    began_s = trio.current_time()
    [answer] = await heard(one.far, 1)
    assert (answer.code, given, trio.current_time() - began_s) == (7, [True, False], 1)
    await trio.sleep(5)
    assert (one.connection.unsent_bytes, one.connection.in_flight) == (0, 0)


async def test_a_held_answer_frees_its_place_when_the_connection_ends(wire: Any) -> None:
    def held(connection: Connection, asked: RemotingCommand) -> Any:
        connection.hold_answer(asked, 60)
        return response_to(asked)

    processors = table(held)
    _, limiter = processors.get(ECHO)  # type: ignore[misc]  # it was registered
    one = wire(processors)
    await one.far.send_all(asked_with(1))
    await trio.testing.wait_all_tasks_blocked()
    assert (limiter.in_use, one.connection.in_flight) == (1, 1)
    one.connection.close("test")
    await trio.testing.wait_all_tasks_blocked()
    assert limiter.in_use == 0


async def test_a_connection_that_is_sent_away_names_the_reason(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    def last(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        connection.leave_soon("one too many: of c1")
        return response_to(asked)

    one = wire(table(last))
    with structlog.testing.capture_logs() as lines:
        await one.far.send_all(asked_with(1) + asked_with(2))
        first, second = await heard(one.far, 2)
    assert (first.code, second.code) == (0, 14)
    assert (second.remark, second.ext["goAway"]) == ("one too many: of c1", "true")
    assert [line["reason"] for line in lines if line["event"] == "connection_ends"] == [
        "one too many: of c1"
    ]
    await until_closed(one.far)


@pytest.mark.parametrize("serialize", list(SerializeType))
async def test_answer_uses_the_header_encoding_of_its_request(
    wire: Any, serialize: SerializeType
) -> None:
    one = wire(table())
    await one.far.send_all(asked_with(5, serialize=serialize))
    [answer] = await heard(one.far, 1)
    assert (answer.serialize, answer.opaque) == (serialize, 5)


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


# ---------------------------------------------------------------------------------- answers


async def test_unknown_code_is_answered_not_supported(wire: Any) -> None:
    one = wire()
    await one.far.send_all(asked_with(3, 4711))
    [answer] = await heard(one.far, 1)
    assert (answer.code, answer.remark, answer.opaque) == (3, " request type 4711 not supported", 3)


def throwing(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    raise ValueError(f"cannot do {bytes(asked.body).decode()}")


async def throwing_later(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    await trio.lowlevel.checkpoint()
    raise ValueError(f"cannot do {bytes(asked.body).decode()}")


@pytest.mark.parametrize("handler", [throwing, throwing_later])
async def test_exception_of_a_handler_is_the_remark(wire: Any, handler: Any) -> None:
    one = wire(table(handler))
    await one.far.send_all(asked_with(1, body=b"this") + asked_with(2, body=b"that"))
    answers = await heard(one.far, 2)
    answers.sort(key=lambda answer: answer.opaque)  # handlers that wait run in any order
    assert [(a.code, a.remark) for a in answers] == [(1, "cannot do this"), (1, "cannot do that")]
    assert {a.ext["outcome"] for a in answers} == {"unknown"}
    assert not one.ended.is_set()


async def test_error_of_ours_is_answered_by_the_outcome_table(wire: Any) -> None:
    def full(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        raise DiskFullError("no space left")

    one = wire(table(full))
    await one.far.send_all(asked_with(1))
    [answer] = await heard(one.far, 1)
    assert (answer.code, answer.ext["outcome"]) == (14, "not_stored")


def silent(_: Connection, asked: RemotingCommand) -> None:
    return None


@pytest.mark.parametrize("handler", [echo, throwing, throwing_later, silent])
async def test_oneway_is_never_answered(wire: Any, handler: Any) -> None:
    one = wire(table(handler))
    oneway = encode_command(request(ECHO, oneway=True))
    unknown = encode_command(request(4711, oneway=True))
    await one.far.send_all(oneway + unknown)
    await trio.testing.wait_all_tasks_blocked()
    assert one.near.sends == []
    assert one.connection.in_flight == 0


async def test_answer_too_large_for_a_frame_becomes_an_error(wire: Any) -> None:
    one = wire(
        table(lambda _, asked: response_to(asked, 0, None, {}, bytes(2000))),
        limits=ConnectionLimits(max_frame_bytes=1000),
    )
    await one.far.send_all(asked_with(1))
    [answer] = await heard(one.far, 1)
    assert (answer.code, answer.ext["outcome"]) == (1, "unknown")
    assert "limit is 1000" in (answer.remark or "")


async def test_answers_of_one_chunk_leave_in_one_send(wire: Any) -> None:
    batches: list[int] = []
    wires: list[Any] = []
    one = wire(table(), after_batch=lambda: batches.append(wires[0].connection.unsent_bytes))
    wires.append(one)
    await one.far.send_all(b"".join(asked_with(n, body=b"x" * n) for n in range(50)))
    answers = await heard(one.far, 50)
    assert [a.opaque for a in answers] == list(range(50))
    assert len(one.near.sends) == 1
    assert batches == [len(one.near.sends[0])]


async def test_deferred_answers_can_be_given_after_the_batch(wire: Any) -> None:
    held: list[RemotingCommand] = []

    def seal() -> None:
        for asked in held:
            one.connection.reply(asked, response_to(asked))
        held.clear()

    one = wire(table(hold_in(held)), after_batch=seal)
    await one.far.send_all(asked_with(1) + asked_with(2) + asked_with(3))
    assert [a.opaque for a in await heard(one.far, 3)] == [1, 2, 3]
    assert len(one.near.sends) == 1


# ---------------------------------------------------------------------------------- limits


async def test_full_limiter_refuses_with_busy_and_frees_when_answered(wire: Any) -> None:
    held: list[RemotingCommand] = []
    one = wire(table(hold_in(held), limit=2))
    await one.far.send_all(asked_with(1) + asked_with(2) + asked_with(3))
    [refused] = await heard(one.far, 1)
    assert (refused.opaque, refused.code, refused.ext["outcome"]) == (3, 2, "not_stored")
    one.connection.reply(held[0], response_to(held[0]))
    await heard(one.far, 1)
    await one.far.send_all(asked_with(4))
    await trio.testing.wait_all_tasks_blocked()
    assert [asked.opaque for asked in held] == [1, 2, 4]


async def test_limiter_is_freed_when_the_connection_ends(wire: Any) -> None:
    limiter = Limiter("test", 2)
    processors = ProcessorTable()
    processors.register(ECHO, lambda _, asked: DEFERRED, limiter)
    one = wire(processors)
    await one.far.send_all(asked_with(1) + asked_with(2))
    await trio.testing.wait_all_tasks_blocked()
    assert limiter.in_use == 2
    await one.far.aclose()
    await one.ended.wait()
    assert limiter.in_use == 0


@pytest.mark.parametrize(
    "limits", [ConnectionLimits(max_in_flight=2), ConnectionLimits(max_in_flight_bytes=250)]
)
async def test_open_requests_of_one_connection_are_limited(
    wire: Any, limits: ConnectionLimits
) -> None:
    one = wire(table(lambda _, asked: DEFERRED), limits=limits)
    await one.far.send_all(b"".join(asked_with(n, body=bytes(100)) for n in (1, 2, 3)))
    [refused] = await heard(one.far, 1)
    assert (refused.opaque, refused.code, refused.ext["outcome"]) == (3, 2, "not_stored")
    assert one.connection.in_flight == 2


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


async def test_peer_that_does_not_read_is_closed(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    one = wire(table(), limits=ConnectionLimits(write_timeout_s=5), lockstep=True)
    await one.far.send_all(asked_with(1, body=bytes(1000)))
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(5, abs=1.5)
    assert one.connection.close_reason == "the peer does not read"


async def test_silence_longer_than_the_write_timeout_costs_no_answer(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    one = wire(table(), limits=ConnectionLimits(write_timeout_s=5))
    for opaque in range(3):
        await one.far.send_all(asked_with(opaque))
        assert [a.opaque for a in await heard(one.far, 1)] == [opaque]
        await trio.sleep(5 * (opaque + 1))
    assert not one.connection.is_closed


async def test_a_send_that_ends_just_when_its_time_does_costs_nothing(
    wire: Any, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
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
        table(hold_in(held)),
        limits=ConnectionLimits(max_write_buffer_bytes=10_000),
        lockstep=True,
    )
    await one.far.send_all(b"".join(asked_with(n) for n in range(20)))
    await trio.testing.wait_all_tasks_blocked()
    sent = [one.connection.reply(a, response_to(a, 0, None, {}, bytes(1000))) for a in held]
    assert sent == [True] * 8 + [False] * 12
    await one.ended.wait()
    assert "more than it reads" in one.connection.close_reason


async def test_half_a_frame_and_then_silence_is_closed(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    one = wire(table(), limits=ConnectionLimits(frame_timeout_s=7))
    await one.far.send_all(asked_with(1)[:30])
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(7, abs=0.1)
    assert "half a frame" in one.connection.close_reason


async def test_frame_that_trickles_in_meets_the_same_deadline(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    one = wire(table(), limits=ConnectionLimits(frame_timeout_s=7))

    async def trickle() -> None:
        for byte in asked_with(1):
            await one.far.send_all(bytes([byte]))
            await trio.sleep(1)

    with pytest.raises(trio.BrokenResourceError):
        await trickle()
    assert trio.current_time() == pytest.approx(8, abs=1.1)


async def test_idle_connection_is_closed_and_traffic_keeps_it(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
    one = wire(table(), limits=ConnectionLimits(idle_timeout_s=120))
    for opaque in range(3):
        await trio.sleep(100)
        await one.far.send_all(asked_with(opaque))
        await heard(one.far, 1)
    await one.ended.wait()
    assert trio.current_time() == pytest.approx(420, abs=1)
    assert one.connection.close_reason == "idle"


async def test_what_we_send_counts_as_traffic_too(
    wire: Any, autojump_clock: trio.testing.MockClock
) -> None:
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


async def test_requests_before_garbage_are_answered(wire: Any) -> None:
    one = wire(table())
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


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
async def test_timed_out_calls_leave_nothing_behind(
    wire: Any, autojump_clock: trio.testing.MockClock, rounds: int
) -> None:
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
    wire: Any, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
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


async def test_code_can_have_one_handler_only() -> None:
    processors = table()
    with pytest.raises(Exception, match="900 has a handler"):
        processors.register(ECHO, echo, Limiter("other", 1))
    assert processors.codes() == {ECHO}


async def test_large_body_leaves_in_pieces_after_its_head(wire: Any) -> None:
    body = bytes(range(256)) * 3000
    one = wire(table(lambda _, asked: response_to(asked, 0, None, {}, memoryview(body))))
    await one.far.send_all(asked_with(1) + asked_with(2))
    answers = await heard(one.far, 2)
    assert [(a.opaque, bytes(a.body) == body) for a in answers] == [(1, True), (2, True)]
    assert max(len(sent) for sent in one.near.sends) <= 256 * 1024


async def test_answer_that_cannot_be_written_becomes_an_error(wire: Any) -> None:
    one = wire(table(lambda _, asked: response_to(asked, 0, "half a character: \ud800")))
    await one.far.send_all(asked_with(1))
    [answer] = await heard(one.far, 1)
    assert (answer.code, answer.ext["outcome"]) == (1, "unknown")
    assert "cannot be written" in (answer.remark or "")


def broken_at_once(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    raise InvariantBroken("two leaders")


async def broken_later(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    await trio.lowlevel.checkpoint()
    raise InvariantBroken("two leaders")


@pytest.mark.parametrize("handler", [broken_at_once, broken_later])
async def test_broken_invariant_is_no_answer_but_the_end(handler: Any) -> None:
    near, far = (MemoryEnd(stream) for stream in trio.testing.memory_stream_pair())
    connection = Connection(near, table(handler))
    await far.send_all(asked_with(1))
    with pytest.RaisesGroup(pytest.RaisesExc(InvariantBroken, match="two leaders")):
        await connection.run()
    assert connection.is_closed


class MemoryEnd:
    """A memory stream with addresses."""

    peer_address = local_address = ("memory", 0)

    def __init__(self, inner: Any) -> None:
        self.send_all = inner.send_all
        self.receive_some = inner.receive_some
        self.aclose = inner.aclose
