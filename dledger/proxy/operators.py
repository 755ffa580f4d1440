"""What operators ask of clients behind a proxy: thread stacks, and one message consumed for them.

A broker asks the proxy, which is the one member of the group that it knows; the proxy asks its
clients over their telemetry streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.clients import ClientTable, Stream
from dledger.proxy.messages import received_message
from dledger.proxy.status import OK
from dledger.remoting.protocol import bodies
from dledger.remoting.seams import Clock, Rng

ANSWER_S: Final = 5.0
"""How long a client may take; a broker waits for the proxy a little longer."""

NONCE_BYTES: Final = 12

QUESTIONS_MAX: Final = 1_024
"""That wait for clients at a time, about 1 KiB each; one more is answered as if none had come."""

NO_CLIENT: Final = "no client of the group has a stream to this proxy"


@dataclass(eq=False, repr=False, slots=True)
class Question:
    """A command that waits for its answer."""

    answer: pb.TelemetryCommand | None = None
    is_answered: trio.Event = field(default_factory=trio.Event)


class Operators:
    """Questions that are on their way to clients."""

    def __init__(self, clients: ClientTable, clock: Clock, rng: Rng) -> None:
        """Ask over the streams of *clients*."""
        self._clients = clients
        self._clock = clock
        self._rng = rng
        self._waiting: dict[str, Question] = {}

    def of_group(self, group: str) -> GroupOfClients:
        """Return what answers brokers for the consumers of *group*."""
        return GroupOfClients(self, group)

    def streams(self, group: str) -> dict[str, Stream]:
        """Return a stream of each consumer of *group*, by client id."""
        return self._clients.consumer_streams(group)

    def now_s(self) -> float:
        """Return the time, for how long a client took."""
        return self._clock.monotonic()

    async def ask(
        self, stream: Stream, command: Callable[[str], pb.TelemetryCommand]
    ) -> pb.TelemetryCommand | None:
        """Send a command and return its answer; None when none came within `ANSWER_S`."""
        if len(self._waiting) >= QUESTIONS_MAX:
            return None
        nonce = self._rng.randbytes(NONCE_BYTES).hex()
        question = self._waiting[nonce] = Question()
        try:
            stream.push(command(nonce))
            with self._clock.time_out(ANSWER_S):
                await question.is_answered.wait()
        finally:
            del self._waiting[nonce]
        return question.answer

    def answered(self, nonce: str, answer: pb.TelemetryCommand) -> None:
        """Take the answer of a client; one that nothing waits for is passed over."""
        question = self._waiting.get(nonce)
        if question is not None and question.answer is None:
            question.answer = answer
            question.is_answered.set()


class GroupOfClients:
    """The consumers of one group, as brokers ask them: `CalledConsumer`."""

    def __init__(self, operators: Operators, group: str) -> None:
        """Answer for *group*."""
        self._operators = operators
        self._group = group

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Do nothing: offsets of POP are in the brokers' log, not at clients."""

    def consumed_offsets(self, topic: str) -> dict[MessageQueue, int]:
        """Return nothing: no queue is one client's."""
        return {}

    async def running_info(self, *, with_stacks: bool) -> bodies.ConsumerRunningInfo:
        """Return the clients of the group, and the stacks of their threads if asked for."""
        streams = self._operators.streams(self._group)
        info = bodies.ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": bodies.ConsumeType.CONSUME_POP.value,
                "consumerGroup": self._group,
                "clients": ",".join(sorted(streams)),
            }
        )
        if with_stacks:
            stacks: dict[str, str] = {}
            async with trio.open_nursery() as nursery:
                for client_id, stream in streams.items():
                    nursery.start_soon(self._take_stack, client_id, stream, stacks)
            info.jstack = "\n".join(f"{name}\n{stack}" for name, stack in sorted(stacks.items()))
        await trio.lowlevel.checkpoint()
        return info

    async def _take_stack(self, client_id: str, stream: Stream, stacks: dict[str, str]) -> None:
        answer = await self._operators.ask(
            stream,
            lambda nonce: pb.TelemetryCommand(
                status=OK,
                print_thread_stack_trace_command=pb.PrintThreadStackTraceCommand(nonce=nonce),
            ),
        )
        found = "" if answer is None else answer.thread_stack_trace.thread_stack_trace
        stacks[client_id] = found or "no answer"

    async def consume_directly(self, message: MessageExt) -> bodies.ConsumeMessageDirectlyResult:
        """Give the newest client of the group one message, and return what came of it."""
        streams = self._operators.streams(self._group)
        result = bodies.ConsumeMessageDirectlyResult()
        began_s = self._operators.now_s()
        stream = max(streams.values(), key=lambda each: each.order, default=None)
        if stream is None:
            result.remark = NO_CLIENT
            return result
        try:
            wire = received_message(message, stream.resource_of(message.topic))
        except MQError as error:
            result.remark = str(error)
            return result
        answer = await self._operators.ask(
            stream,
            lambda nonce: pb.TelemetryCommand(
                status=OK, verify_message_command=pb.VerifyMessageCommand(nonce=nonce, message=wire)
            ),
        )
        result.consume_result, result.remark = verdict_of(answer)
        result.spent_time_mills = int((self._operators.now_s() - began_s) * 1000)
        return result


def verdict_of(answer: pb.TelemetryCommand | None) -> tuple[str, str]:
    """Return what a client made of a message, in RocketMQ's words, and its own."""
    if answer is None:
        return "CR_RETURN_NULL", f"no answer within {ANSWER_S:g} s"
    code = answer.status.code
    if code == pb.OK:
        return "CR_SUCCESS", answer.status.message
    if code == pb.FAILED_TO_CONSUME_MESSAGE:
        return "CR_LATER", answer.status.message
    return "CR_THROW_EXCEPTION", f"code {code}: {answer.status.message}"
