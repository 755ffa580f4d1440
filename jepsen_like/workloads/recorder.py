"""What all clients of a run share: rows, values, contents and the time.

A call leaves a row when it begins and completes it when it ends. A logical client that saw an
unknown outcome is retired: another process number goes on in its place.

`OUTCOMES` gives each error of the SDK its outcome: ok, fail or info. A wrong `fail` invents aborted
reads, a wrong `info` hides lost writes. The run that met an error beyond the table fails, so the
table stays complete.

A value stands in the first bytes of a body. Beside it a message has the rest of its body, a tag,
keys, properties and its time of birth (`Contents`): readers compare these with what was sent,
except properties that brokers and clients add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core import errors as client_errors
from dledger.client.core.errors import ClientError, OffsetIllegalError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, PullStatus
from dledger.client.core.route import MessageQueue
from dledger.commitlog import errors as log_errors
from dledger.jepsen_like.checkers.contents import BODY, BORN, PROPERTIES, STORED
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX, Verdict, Violation
from dledger.jepsen_like.history.operation import (
    CLIENT_BITS,
    NEVER,
    NOTHING,
    F,
    History,
    Level,
    Operation,
    Outcome,
)
from dledger.jepsen_like.nemesis.ground import Moment
from dledger.jepsen_like.plans.plan import REST_FACTOR, Plan
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream

CONTENT_PROPERTY: Final = "own"
"""Property of messages that have none of their own: a lost one is seen."""
CONTENT_BODY_BYTES_MIN: Final = 64
"""Shorter bodies have no such property: they stay as short as they are to be."""
BORN_WITHIN_MS: Final = 60_000
"""A producer sends a message this soon after it has made it."""


class Seen(Protocol):
    """A message as a client read it: a `MessageExt`."""

    @property
    def body(self) -> bytes:
        """The body."""

    @property
    def tags(self) -> str:
        """Its tag."""

    @property
    def keys(self) -> str:
        """Its keys."""

    @property
    def properties(self) -> dict[str, str]:
        """All properties."""

    @property
    def born_timestamp_ms(self) -> int:
        """When it was sent, by its producer."""


class _Sent(NamedTuple):
    body: bytes
    tags: str
    keys: str
    properties: Mapping[str, str]
    born_from_ms: int
    born_to_ms: int


class Contents:
    """What was sent under each value, by digest of the body."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def note(self, value: int, message: Message, now_ms: int, *, is_hostile: bool) -> None:
        """Take note of a message that is about to be sent.

        *is_hostile*: it has properties that brokers may change.
        """
        keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
        properties = {} if is_hostile else dict(message.properties or {})
        self._sent[value] = _Sent(
            _digest(message.body), message.tags, keys, properties, now_ms, now_ms + BORN_WITHIN_MS
        )

    def difference(self, value: int, seen: Seen) -> str:
        """Return what *seen* has otherwise than what was sent, by its anomaly; empty: nothing.

        A value that was never sent has no content to compare. The first time of birth that is seen
        of a value is the one that later reads are compared with.
        """
        sent = self._sent.get(value)
        if sent is None:
            return ""
        if _digest(seen.body) != sent.body:
            return BODY
        if (seen.tags, seen.keys) != (sent.tags, sent.keys):
            return PROPERTIES
        there = seen.properties
        if any(there.get(name) != text for name, text in sent.properties.items()):
            return PROPERTIES
        born_ms = seen.born_timestamp_ms
        if not sent.born_from_ms <= born_ms <= sent.born_to_ms:
            return BORN
        self._sent[value] = sent._replace(born_from_ms=born_ms, born_to_ms=born_ms)
        return ""


def _digest(body: Any) -> bytes:
    return blake2b(body, digest_size=8).digest()


OUTCOMES: Final[dict[type[Exception], Outcome]] = {
    # Refused before anything was handed to the network.
    client_errors.MessageIllegalError: Outcome.FAIL,
    client_errors.SubscriptionIllegalError: Outcome.FAIL,
    client_errors.ClientClosedError: Outcome.FAIL,
    client_errors.BackpressureError: Outcome.FAIL,
    client_errors.NoNameServerError: Outcome.FAIL,
    client_errors.NoRouteError: Outcome.FAIL,
    client_errors.BrokerUnreachableError: Outcome.FAIL,
    log_errors.LocalProtocolError: Outcome.FAIL,
    # A broker refused before it appended.
    client_errors.BrokerRefusedError: Outcome.FAIL,
    client_errors.BrokerBusyError: Outcome.FAIL,
    client_errors.TransactionDecidedError: Outcome.FAIL,
    client_errors.AlreadyDeliveredError: Outcome.FAIL,
    client_errors.StepOvertakenError: Outcome.FAIL,
    client_errors.OffsetIllegalError: Outcome.FAIL,
    client_errors.RequestFailedError: Outcome.FAIL,
    client_errors.ConfirmationNeededError: Outcome.FAIL,
    client_errors.DamagedAnswerError: Outcome.FAIL,
    client_errors.LockLostError: Outcome.FAIL,
    client_errors.ReceiptStaleError: Outcome.FAIL,
    client_errors.RequesterAwayError: Outcome.FAIL,
    # Stored: only the reply is missing.
    client_errors.ReplyTimedOutError: Outcome.OK,
    # Unknown.
    client_errors.UnknownOutcomeError: Outcome.INFO,
    client_errors.RequestTimedOutError: Outcome.INFO,
}
"""By exact class: a new subclass must be thought about, not inherit an answer."""


class Classified(NamedTuple):
    """The outcome of an error, and whether the table knows the error."""

    outcome: Outcome
    is_known: bool


def classify(error: Exception) -> Classified:
    """Return what the history may say about an operation that ended in *error*.

    An error that reports of itself that its outcome is unknown is never called a failure, whatever
    its class.
    """
    outcome = OUTCOMES.get(type(error))
    if outcome is None:
        return Classified(Outcome.INFO, is_known=False)
    if getattr(error, "outcome", "unknown") == "unknown":
        return Classified(Outcome.INFO, is_known=True)
    return Classified(outcome, is_known=True)


TOPIC: Final = "orders"
BROKER: Final = "sim"
PULL_MESSAGES: Final = 32
VALUE_BYTES: Final = 8


class Stage(Protocol):
    """Where clients act: simulated or real time."""

    @property
    def elapsed_s(self) -> float:
        """Time of the run; the history's clock."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""


def unrecorded(_: Operation) -> None:
    """Keep rows in memory only."""


def value_of(body: Any) -> int:
    """Return the value in a message body, or `NOTHING` when it is not one of a workload."""
    view = memoryview(body)
    return int.from_bytes(view[:VALUE_BYTES], "big") if view.nbytes >= VALUE_BYTES else NOTHING


class Recorder:
    """Records what the clients of a run do, and lets them act until it is over.

    Args:
        broker: Name of the broker group; empty: any that has queues of the topic.
        record: Gets a row when it is called and when it has ended; what an answer held is written
            into it before the next checkpoint of trio.

    Attributes:
        counts: Rows by kind and outcome, and ``unclassified`` errors.
        contents: What messages hold, by value.
        unclassified: Errors the outcome table does not know; the run fails.
    """

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        history: History,
        *,
        broker: str = BROKER,
        topic: str = TOPIC,
        record: Callable[[Operation], None] = unrecorded,
    ) -> None:
        self.stage = stage
        self.plan = plan
        self._record = record
        self.history = history
        self.counts: Counter[str] = Counter()
        self.unclassified: list[str] = []
        self._op_id = 0
        self._process = 0
        self._values: Counter[int] = Counter()
        self._awaited: dict[Moment, trio.Event] = {}
        self._lives: Counter[tuple[str, int]] = Counter()
        self._is_over = False
        self._busy = 0
        self.contents = Contents()
        self.topic = topic
        self.queues = [MessageQueue(topic, broker, i) for i in range(plan.workload.queues)]

    def rng_of(self, role: str, index: int) -> SimRng:
        """Return chance for the next run of a client: a killed one does not repeat itself."""
        self._lives[role, index] += 1
        return rng_stream(self.plan.seed, role, index, self._lives[role, index])

    # -- rows ------------------------------------------------------------------------------

    def new_process(self) -> int:
        """Return the number of a logical client that has done nothing yet."""
        self._process += 1
        return self._process

    @property
    def now_ns(self) -> int:
        """The history's clock."""
        return round(self.stage.elapsed_s * 1e9)

    def begin(self, process: int, f: F, queue: MessageQueue | None = None) -> Operation:
        """Return the row of an operation that is called now."""
        op_id = self._op_id
        self._op_id += 1
        topic, queue_id = (queue.topic, queue.queue_id) if queue is not None else ("", NOTHING)
        op = Operation(
            op_id, op_id, process, NOTHING, f, Outcome.INFO, self.now_ns, NEVER, topic, queue_id
        )
        self.history.operations.append(op)
        self._record(op)
        return op

    def written(self, op: Operation) -> None:
        """Record an operation that has begun again, with what was not known before."""
        self._record(op)

    def end(self, op: Operation) -> None:
        """It ended well, now."""
        op.outcome, op.ret_ns = Outcome.OK, self.now_ns
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_ok"] += 1

    def failed(self, op: Operation, error: Exception) -> None:
        """It ended in *error*, now."""
        outcome, is_known = classify(error)
        op.outcome, op.err = outcome, type(error).__name__
        op.ret_ns = NEVER if outcome is Outcome.INFO else self.now_ns
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_{outcome.name.lower()}"] += 1
        if not is_known:
            self.unclassified.append(f"{type(error).__name__}: {error}")

    @contextmanager
    def attempt(self, *ops: Operation) -> Iterator[None]:
        """End *ops* as the block ends: well, or in its `ClientError`, which goes no further."""
        try:
            yield
        except ClientError as error:
            for op in ops:
                self.failed(op, error)
        else:
            for op in ops:
                self.end(op)

    def unknown(self, op: Operation, why: str) -> None:
        """It ended in *why*, which states nothing of what it did."""
        op.err = why
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_info"] += 1

    def refused(self, op: Operation, why: str) -> None:
        """It was answered with a plain no, now; it did not happen."""
        op.outcome, op.ret_ns, op.err = Outcome.FAIL, self.now_ns, why
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_fail"] += 1

    def outcome_verdicts(self) -> list[Verdict]:
        """Return the verdict over errors that the outcome table does not know; none: it has all."""
        violations = tuple(
            Violation("unclassified outcome", "client", text)
            for text in self.unclassified[:REPORTED_MAX]
        )
        return [Verdict("outcomes", "invalid", violations)] if violations else []

    def next_value(self, client: int) -> int:
        """Return a value that was not sent before."""
        self._values[client] += 1
        return client << CLIENT_BITS | self._values[client]

    def seen(self, op: Operation, message: Seen) -> int:
        """Return the value of a message that *op* has found, compared with what was sent."""
        value = value_of(message.body)
        op.err = op.err or self.contents.difference(value, message)
        return value

    def found(self, op: Operation, messages: Sequence[MessageExt]) -> list[int]:
        """Return the values of what a pull has found, in the order of their queue."""
        values = [self.seen(op, message) for message in messages]
        times_ms = [message.store_timestamp_ms for message in messages]
        if any(later < earlier for earlier, later in pairwise(times_ms)):
            op.err = op.err or STORED
        return values

    # -- moments that faults wait for --------------------------------------------------------

    async def reach(self, moment: Moment) -> None:
        """Wait until some client is at *moment*."""
        reached = self._awaited.setdefault(moment, trio.Event())
        try:
            await reached.wait()
        finally:
            self._awaited.pop(moment, None)

    def is_awaited(self, moment: Moment) -> bool:
        """Whether a fault waits for *moment*."""
        return moment in self._awaited

    def arrive(self, moment: Moment) -> None:
        """Wake the fault that waits for a client at *moment*."""
        awaited = self._awaited.pop(moment, None)
        if awaited is not None:
            awaited.set()

    # -- until it is over ----------------------------------------------------------------------

    async def finish(self) -> None:
        """Begin nothing new; return when everything begun has ended."""
        self._is_over = True
        while self._busy:
            await self.stage.sleep(0.1)

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._is_over

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Be waited for by `finish` meanwhile."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await self.stage.sleep(seconds)

    async def pause(self, rng: SimRng) -> bool:
        """Wait between two operations; false when it is over."""
        await self.stage.sleep(rng.expovariate(1000.0 / self.plan.workload.interval_ms))
        return not self._is_over

    async def rest(self, rng: SimRng) -> bool:
        """Wait for much longer now and then; false when it is over."""
        rests = self.plan.workload.rest_per_mille
        if rests and rng.randrange(1000) < rests:
            for _ in range(REST_FACTOR - 1):
                if not await self.pause(rng):
                    return False
        return not self._is_over

    # -- calls that leave a row ------------------------------------------------------------

    async def commit(
        self,
        consumer: PullConsumer,
        process: int,
        queue: MessageQueue,
        offset: int,
        token: int | None = None,
    ) -> Operation:
        """Commit an offset, under a lock where there is a *token*."""
        op = self.begin(process, F.COMMIT, queue)
        op.group, op.off = consumer.group, offset
        op.token = NOTHING if token is None else token
        with self.attempt(op):
            await consumer.commit_offset(queue, offset, lock_token=token)
        return op

    async def fetch_commit(
        self, consumer: PullConsumer, process: int, queue: MessageQueue
    ) -> Operation:
        """Ask for the committed offset."""
        op = self.begin(process, F.FETCH_COMMIT, queue)
        op.group = consumer.group
        with self.attempt(op):
            offset = await consumer.committed_offset(queue)
            op.off = NOTHING if offset is None else offset
        return op

    async def pull(
        self,
        consumer: PullConsumer,
        process: int,
        queue: MessageQueue,
        offset: int,
        wait_s: float = 0.0,
        group: str = "",
    ) -> tuple[Operation, int]:
        """Pull at an offset; return the row and where to go on."""
        op = self.begin(process, F.PULL, queue)
        op.off, op.group = offset, group
        try:
            # With those whose time to live is over: the log keeps them, and no checker knows times.
            result = await consumer.pull(
                queue, offset, max_messages=PULL_MESSAGES, timeout_s=wait_s, with_expired=True
            )
        except OffsetIllegalError as error:
            self.end(op)
            if offset >= error.max_offset:
                op.max_off = error.max_offset
            else:
                op.level = Level.LOCAL  # any member refuses too small ones, by what it knows
            op.min_off = error.min_offset
            return op, error.next_begin_offset
        except ClientError as error:
            self.failed(op, error)
            return op, offset
        self.end(op)
        values = self.found(op, result.messages)
        for place, message in enumerate(result.messages):
            if message.queue_offset != offset + place:
                self.unclassified.append(f"a pull at {offset} has a hole at {offset + place}")
        op.values, op.cnt = tuple(values), len(values)
        if values and result.next_begin_offset != offset + len(values):
            self.unclassified.append(
                f"a pull at {offset} found {len(values)} and goes on at {result.next_begin_offset}"
            )
        if result.status is PullStatus.NO_NEW_MESSAGE:
            # Only then a majority was asked; beside messages the bounds may be old.
            op.max_off, op.min_off = result.max_offset, result.min_offset
        return op, result.next_begin_offset

    async def max_offset(
        self, consumer: PullConsumer, process: int, queue: MessageQueue
    ) -> Operation:
        """Ask where a queue ends."""
        op = self.begin(process, F.MAX_OFFSET, queue)
        with self.attempt(op):
            op.max_off = await consumer.max_offset(queue)
        return op
