"""Questions of operators to clients: nonces, answers, silence."""

from __future__ import annotations

from random import Random

import pytest
import trio.testing

from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import operators as module
from dledger.proxy.clients import Client, ClientTable, Stream
from dledger.proxy.operators import Operators, verdict_of
from dledger.remoting.machine import TrioClock


def ask_for_stack(nonce: str) -> pb.TelemetryCommand:
    command = pb.PrintThreadStackTraceCommand(nonce=nonce)
    return pb.TelemetryCommand(print_thread_stack_trace_command=command)


def made() -> tuple[Operators, ClientTable]:
    table = ClientTable()
    return Operators(table, TrioClock(), Random(1)), table


async def test_answer_belongs_to_its_nonce(autojump_clock: trio.testing.MockClock) -> None:
    operators, _ = made()
    stack = pb.TelemetryCommand(thread_stack_trace=pb.ThreadStackTrace(thread_stack_trace="main"))

    def answer(command: pb.TelemetryCommand) -> None:
        operators.answered("another", pb.TelemetryCommand())
        operators.answered(command.print_thread_stack_trace_command.nonce, stack)

    assert await operators.ask(Stream(answer, 1, Client("a", 0)), ask_for_stack) == stack


async def test_silent_client_is_waited_for_briefly(autojump_clock: trio.testing.MockClock) -> None:
    operators, _ = made()
    began_s = trio.current_time()
    assert await operators.ask(Stream(lambda _: None, 1, Client("a", 0)), ask_for_stack) is None
    assert trio.current_time() - began_s == module.ANSWER_S


async def test_number_of_questions_is_bounded(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUESTIONS_MAX", 1)
    operators, _ = made()
    pushed: list[pb.TelemetryCommand] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(
                operators.ask, Stream(pushed.append, 1, Client("a", 0)), ask_for_stack
            )
    assert len(pushed) == 1


async def test_group_reports_each_of_its_clients(autojump_clock: trio.testing.MockClock) -> None:
    operators, table = made()
    for name in ("a", "b"):
        table.heard(name, 0, group="workers")

    def answer(command: pb.TelemetryCommand) -> None:
        nonce = command.print_thread_stack_trace_command.nonce
        trace = pb.ThreadStackTrace(nonce=nonce, thread_stack_trace="main: busy")
        operators.answered(nonce, pb.TelemetryCommand(thread_stack_trace=trace))

    table.open_stream("a", answer, 0)
    table.open_stream("b", lambda _: None, 0)
    group = operators.of_group("workers")
    info = await group.running_info(with_stacks=True)
    assert info.jstack == "a\nmain: busy\nb\nno answer"
    assert info.properties["clients"] == "a,b"
    assert (await group.running_info(with_stacks=False)).jstack is None


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (pb.OK, "CR_SUCCESS"),
        (pb.FAILED_TO_CONSUME_MESSAGE, "CR_LATER"),
        (pb.VERIFY_FIFO_MESSAGE_UNSUPPORTED, "CR_THROW_EXCEPTION"),
    ],
)
def test_verdict_is_that_of_the_client(code: pb.Code, verdict: str) -> None:
    answer = pb.TelemetryCommand(status=pb.Status(code=code, message="as it was"))
    assert verdict_of(answer)[0] == verdict
    assert "as it was" in verdict_of(answer)[1]


def test_silence_is_a_verdict_of_its_own() -> None:
    assert verdict_of(None)[0] == "CR_RETURN_NULL"
