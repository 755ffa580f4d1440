"""How the requests of a peer are answered: once, in any order, at their time, and how they fail."""

from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.errors import DiskFullError, InvariantBroken
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import ConnectionLimits, Silence
from dledger.remoting.handling import DEFERRED, Limiter, OpenRequests
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.frame import encode_command
from tests.harness.wire_frames import ECHO, Linked, asked_with, echo, heard, hold_in, table


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


@pytest.mark.parametrize("serialize", list(SerializeType))
async def test_answer_uses_the_header_encoding_of_its_request(
    wire: Any, serialize: SerializeType
) -> None:
    one = wire(table())
    await one.far.send_all(asked_with(5, serialize=serialize))
    [answer] = await heard(one.far, 1)
    assert (answer.serialize, answer.opaque) == (serialize, 5)


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


# -- requests of one peer: what is admitted, what is given back, how long silence may be


LIMITS = ConnectionLimits(max_in_flight=3, max_in_flight_bytes=100)


def asked(size_bytes: int) -> RemotingCommand:
    return request(10, body=b"x" * size_bytes)


def test_larger_request_than_the_limit_is_admitted_alone() -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 10)
    large, small = asked(1_000), asked(1)
    assert held.admit(large, limiter, 1.0) is None
    assert held.admit(small, limiter, 2.0) == "[OVERLOAD]too many requests of this connection"
    assert (len(held), held.size_bytes, limiter.in_use) == (1, 1_000, 1)
    finished = held.finish(large)
    assert finished is not None
    assert (finished.asked, finished.size_bytes, finished.arrived_s) == (large, 1_000, 1.0)
    assert held.finish(large) is None
    assert (len(held), held.size_bytes, limiter.in_use) == (0, 0, 0)
    assert held.admit(small, limiter, 3.0) is None


def test_full_limiter_is_named_and_nothing_is_held() -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 1)
    assert limiter.try_acquire()
    assert held.admit(asked(5), limiter, 0.0) == "[OVERLOAD]1 requests of kind send are open"
    assert (len(held), held.size_bytes, limiter.in_use) == (0, 0, 1)


@given(st.lists(st.one_of(st.integers(0, 60), st.sampled_from(["finish", "end_all"])), max_size=30))
def test_requests_hold_what_is_open_and_no_more(steps: list[int | str]) -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 5)
    model: list[RemotingCommand] = []
    for step in steps:
        if step == "end_all":
            held.end_all()
            model.clear()
        elif step == "finish":
            if model:
                assert held.finish(model.pop(0)) is not None
        elif isinstance(step, int):
            command, used = asked(step), sum(len(bytes(each.body)) for each in model)
            fits = not model or (len(model) < 3 and used + step <= 100)
            assert (held.admit(command, limiter, 0.0) is None) == fits
            if fits:
                model.append(command)
        assert len(held) == limiter.in_use == len(model)
        assert held.size_bytes == sum(len(bytes(each.body)) for each in model)


@pytest.mark.parametrize(
    ("received_s", "sent_s", "ends_s"), [(5.0, 0.0, 125.0), (5.0, 7.0, 127.0), (9.0, 7.0, 129.0)]
)
def test_silence_between_frames_counts_both_ways(
    received_s: float, sent_s: float, ends_s: float
) -> None:
    silence = Silence(ConnectionLimits())
    silence.last_received_s = received_s
    assert (silence.ends_s(sent_s), silence.reason) == (ends_s, "idle")


def test_frame_must_be_whole_in_time_however_slowly_it_comes() -> None:
    silence = Silence(ConnectionLimits(frame_timeout_s=60.0))
    silence.note_frames(10.0, has_whole=False, has_part=True)
    silence.last_received_s = 40.0
    silence.note_frames(40.0, has_whole=False, has_part=True)
    assert (silence.ends_s(45.0), silence.reason) == (70.0, "half a frame and then silence")
    silence.note_frames(50.0, has_whole=True, has_part=True)
    assert silence.ends_s(0.0) == 110.0
    silence.read_again(80.0)
    assert silence.ends_s(0.0) == 140.0
    silence.note_frames(90.0, has_whole=True, has_part=False)
    silence.read_again(95.0)
    assert not silence.is_in_frame
    assert silence.ends_s(0.0) == 160.0
