"""The offsets of a consumer group: where they are kept, where a queue begins, and how one is reset.

A group that shares its queues keeps its offsets on the brokers, for the next owner of a queue.
Consumers that each read every message keep their own, in a local file or nowhere.

An operator may move a group while its consumers run (220). The consumer stops handing out, drops
what it has pulled of these queues, stores the new offsets, waits a moment for listeners that still
have old messages, and continues. The result of such a listener no longer counts.

Spec: docs/internals/protocol/semantics.md, section 6; docs/internals/protocol/remoting.md, section
8.5.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import trio

from dledger.client.consumer.owned_queues import OwnedQueue, OwnedQueues
from dledger.client.consumer.pull_consumer import PullConsumer, offset_in
from dledger.client.core.broker_requests import sdk_queue, wire_queue
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientError,
    RequestTimedOutError,
    refusal,
)
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError, MQError
from dledger.commitlog.seams import Disk
from dledger.remoting.log import get_logger
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import ConsumeFromWhere
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import QueryConsumerOffsetHeader, UpdateConsumerOffsetHeader
from dledger.remoting.protocol.own_fields import BY_OPERATOR_FIELD, TOKEN_FIELD
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.remoting.seams import Clock, Executor

_log = get_logger(__name__)

DEFAULT_TIMESTAMP_AGO_MS: Final = 30 * 60 * 1000
"""How far back CONSUME_FROM_TIMESTAMP goes when no time is named."""
TIMESTAMP_FORM: Final = "%Y%m%d%H%M%S"
"""RocketMQ's consumeTimestamp: yyyyMMddHHmmss; here always UTC."""


@dataclass(frozen=True, slots=True)
class ConsumeFrom:
    """Where a group begins in a queue that it has never committed an offset of.

    Attributes:
        where: First, last or a time.
        timestamp_ms: That time, since the epoch; None: half an hour before the consumer asks.
    """

    where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    timestamp_ms: int | None = None

    @classmethod
    def timestamp(cls, text: str) -> ConsumeFrom:
        """Return the beginning at a time written ``yyyyMMddHHmmss``, UTC.

        Raises:
            ValueError: It is not written so.
        """
        at = datetime.strptime(text, TIMESTAMP_FORM).replace(tzinfo=UTC)
        return cls(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, int(at.timestamp() * 1000))


FROM_FIRST: Final = ConsumeFrom(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
FROM_LAST: Final = ConsumeFrom()

_FIRST: Final = frozenset(
    (ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, ConsumeFromWhere.CONSUME_FROM_MIN_OFFSET)
)


async def first_offset(
    reader: PullConsumer, queue: MessageQueue, begin: ConsumeFrom, now_ms: int
) -> int:
    """Return where to begin in a queue without a stored offset.

    Args:
        now_ms: The date, for a beginning that is not named.
    Raises:
        ClientError: No broker answers; asking again may help.
    """
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    if begin.where in _FIRST:
        # What is kept may begin later: the broker answers where, at the first pull.
        return 0
    if begin.where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        if is_retry:
            return await reader.max_offset(queue)
        at_ms = begin.timestamp_ms
        return await reader.search_offset(
            queue, now_ms - DEFAULT_TIMESTAMP_AGO_MS if at_ms is None else at_ms
        )
    # A retry that came before its consumer is not to be missed.
    return 0 if is_retry else await reader.max_offset(queue)


COMMIT_TIMEOUT_S: Final = 5.0
"""For one offset; the next round brings it again."""
MAX_COMMITS_AT_ONCE: Final = 64
"""Commits of one round that are out together."""
OFFSETS_FILE: Final = "offsets.json"
DEFAULT_INSTANCE: Final = "DEFAULT"
"""Stands in a path for a client without a name: what it gets is another one each time."""


class OffsetStore(Protocol):
    """Keeps an offset per queue."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return what was stored, or None when nothing ever was.

        Raises ClientError: no broker answers; that is not the same as no offset.
        """

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """Store *offsets*; return the queues of which they are stored for certain."""


class BrokerOffsets:
    """Offsets on the brokers of their queues, in their replicated log."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        token: Callable[[MessageQueue], int | None] = lambda _: None,
        *,
        by_operator: bool = False,
    ) -> None:
        """Keep the offsets of *group*.

        Args:
            token: Fencing token under which a queue is consumed; a broker stores nothing under an
                old one.
            by_operator: No consumer commits here: brokers write an audit line for each commit.
        """
        self._instance = instance
        self._group = group
        self._token = token
        self._mark = {BY_OPERATOR_FIELD: "true"} if by_operator else {}

    async def load(self, queue: MessageQueue) -> int | None:
        """Return what the group has committed last, as stored, never an old answer.

        A queue that is young and whole begins at 0 without a commit of it, as in RocketMQ.

        Raises ClientError: see `OffsetStore`.
        """
        header = QueryConsumerOffsetHeader(self._group, queue.topic, queue.queue_id)
        answer = await self._instance.ask_leader(
            queue.broker_name,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {**header.encode(), "sync": "true"},
            topic=queue.topic,
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(f"{queue}: the broker gave no offset", answer)
        return offset_in(answer, queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """See `OffsetStore`. Our brokers answer when an offset is in the log."""
        saved: set[MessageQueue] = set()
        silent: set[str] = set()
        limiter = trio.CapacityLimiter(MAX_COMMITS_AT_ONCE)
        # Now: a queue that is lost and granted again meanwhile must not get an offset of before.
        tokens = {queue: self._token(queue) for queue in offsets}

        async def commit(queue: MessageQueue, offset: int) -> None:
            async with limiter:
                if queue.broker_name in silent:
                    return  # thousands of time-outs would hold up the offsets of other brokers
                try:
                    await self._commit(queue, offset, tokens[queue])
                except MQError as error:
                    if isinstance(error, RequestTimedOutError | BrokerUnreachableError):
                        silent.add(queue.broker_name)
                    _log.info("offset_not_committed", queue=str(queue), error=str(error))
                else:
                    saved.add(queue)

        async with trio.open_nursery() as nursery:
            for queue, offset in offsets.items():
                nursery.start_soon(commit, queue, offset)
        return saved

    async def _commit(self, queue: MessageQueue, offset: int, token: int | None) -> None:
        header = UpdateConsumerOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
        shown = {} if token is None else {TOKEN_FIELD: str(token)}
        answer = await self._instance.ask_leader(
            queue.broker_name,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {**header.encode(), **shown, **self._mark},
            topic=queue.topic,
            timeout_s=COMMIT_TIMEOUT_S,
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(f"{queue}: commit of {offset}", answer)


@dataclass(eq=False, repr=False)
class LocalOffsets:
    """Offsets in a JSON file, in the form of RocketMQ's Java client. The file is replaced whole."""

    _disk: Disk
    _executor: Executor
    _path: str

    def __post_init__(self) -> None:
        self._offsets: dict[MessageQueue, int] | None = None
        self._lock = trio.Lock()

    async def load(self, queue: MessageQueue) -> int | None:
        """See `OffsetStore`.

        Raises ConfigError: the file is none of offsets; it is left as it is.
        """
        async with self._lock:
            return (await self._known()).get(queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """See `OffsetStore`. Durable when it returns.

        Raises MQError, OSError: the disk refused; the file is as it was.
        """
        async with self._lock:
            known = {**await self._known(), **offsets}
            table = {wire_queue(queue): offset for queue, offset in known.items()}
            text = bodies.ResetOffsetBody(offset_table=table).encode()
            await self._executor.run(lambda: self._write(text), kind=self._path)
            self._offsets = known
        return set(offsets)

    def _write(self, text: bytes) -> None:
        self._disk.make_dir(posixpath.dirname(self._path))
        self._disk.replace(self._path, text)

    async def _known(self) -> dict[MessageQueue, int]:
        if self._offsets is None:
            text = await self._executor.run(self._read, kind=self._path)
            self._offsets = {} if text is None else _offsets_in(text, self._path)
        return self._offsets

    def _read(self) -> bytes | None:
        return self._disk.read(self._path) if self._disk.exists(self._path) else None


def _offsets_in(text: bytes, path: str) -> dict[MessageQueue, int]:
    try:
        table = bodies.ResetOffsetBody.decode(text).offset_table
    except MQError as error:
        raise ConfigError(f"{path} holds no offsets: {error}") from error
    return {sdk_queue(queue): offset for queue, offset in table.items()}


def offsets_path(folder: str, client_ip: str, instance_name: str, group: str) -> str:
    """Return the file for the offsets of a broadcasting *group* below *folder*."""
    client = f"{client_ip}@{instance_name or DEFAULT_INSTANCE}"
    return posixpath.join(folder, client, group, OFFSETS_FILE)


class UnkeptOffsets:
    """An `dledger.client.consumer.offsets.OffsetStore` that knows nothing and forgets at once."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return None: nothing is known of any queue."""
        return None

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """Say that all is well; the offsets are where the consumer is, and nowhere else."""
        return set(offsets)


ASK_AGAIN_S = 1.0
"""Pause before it is asked again where to begin."""
LATE_S: Final = 15.0
"""So long after a queue was gained the last offset of the owner before may still be on its way: it
waits for commits that are under way, 5 s, and has 5 s itself."""


@dataclass(eq=False, repr=False)
class QueueOffsets:
    """Loads and stores the offsets of owned queues.

    An offset that is stored already is not stored again, but once after `LATE_S`: what the owner
    before stored late must not stand for it. Nothing is stored of a queue after its last time: by
    then another client owns it.
    """

    _store: OffsetStore
    _reader: PullConsumer
    _begin: ConsumeFrom
    _clock: Clock
    may_store: Callable[[OwnedQueue], bool] = lambda _: True

    def __post_init__(self) -> None:
        self._stored: dict[MessageQueue, int] = {}
        # When an offset that is stored is to be stored once more.
        self._again_s: dict[MessageQueue, float] = {}
        # Where an operator wants queues to go on, until that is stored.
        self._asked: dict[MessageQueue, int] = {}
        # Queues that are given up; what runs next stores the last offsets of all of them.
        self._given_up: list[OwnedQueue] = []
        # An old offset on its way must not overtake the last one.
        self._saving = trio.Lock()

    async def begin(self, owned: OwnedQueue) -> None:
        """Let *owned* begin where it was left, or where a group begins that was never here."""
        queue, before = owned.queue, owned.messages
        self.forget(queue)
        while not owned.is_dropped and queue not in self._asked:
            try:
                stored = await self._store.load(queue)
                at = stored
                if at is None:
                    now_ms = self._clock.wall_ms()
                    at = await first_offset(self._reader, queue, self._begin, now_ms)
            except ClientError as error:
                _log.info("no_offset_yet", queue=str(queue), error=str(error))
                await self._clock.sleep(ASK_AGAIN_S)
                if owned.messages is not before:
                    return
                continue
            if owned.messages is not before:
                return  # this answer is older than a reset or a seek
            if stored is not None:
                self._stored[queue] = stored
            owned.begin(at)
            return
        if not owned.is_dropped:
            owned.begin(self._asked[queue])

    def forget(self, queue: MessageQueue) -> None:
        """It is not known any more what is stored of *queue*: another client may have had it."""
        self._stored.pop(queue, None)
        self._again_s[queue] = self._clock.monotonic() + LATE_S

    async def reset(self, wanted: Iterable[tuple[OwnedQueue, int]]) -> None:
        """Make queues go on at given offsets, whatever is stored of them, and store those.

        What cannot be stored now, also for want of a lock, is stored as soon as it can be.
        """
        async with self._saving:
            # One that was given up meanwhile is its next owner's to reset.
            wanted = [(owned, offset) for owned, offset in wanted if not owned.is_given_up]
            for owned, offset in wanted:
                self._asked[owned.queue] = offset
                owned.begin(offset)
        await self.save([owned for owned, _ in wanted])

    async def run(self, owned: Iterable[OwnedQueue], period_s: float) -> None:
        """Store what has changed of *owned*, as it is then, every *period_s*, until cancelled."""
        while True:
            await self._clock.sleep(period_s)
            await self.save(owned)

    async def give_up(self, owned: OwnedQueue) -> None:
        """Store the offset of *owned* for the last time, together with others that are given up."""
        self._given_up.append(owned)
        async with self._saving:
            leaving, self._given_up = self._given_up, []
            await self._save(leaving, is_last=True)

    async def save(self, owned: Iterable[OwnedQueue], *, is_last: bool = False) -> None:
        """Store what has changed; what cannot be stored is tried again the next time."""
        async with self._saving:
            await self._save(owned, is_last=is_last)

    async def _save(self, owned: Iterable[OwnedQueue], *, is_last: bool) -> None:
        offsets: dict[MessageQueue, int] = {}
        now_s = self._clock.monotonic()
        for item in owned:
            messages = item.messages
            if is_last:
                item.is_given_up = True
                self._asked.pop(item.queue, None)
            if messages is None or (item.is_dropped and not is_last):
                continue
            if not self.may_store(item):
                continue
            is_stored = self._stored.get(item.queue) == messages.commit_offset
            if is_stored and (is_last or self._again_s.get(item.queue, now_s) >= now_s):
                self._asked.pop(item.queue, None)
            else:
                offsets[item.queue] = messages.commit_offset
        if not offsets:
            return
        for queue in offsets:
            self._stored.pop(queue, None)  # without an answer either offset may be stored
        try:
            saved = await self._store.save(offsets)
        except (MQError, OSError) as error:
            _log.warning("offsets_not_stored", queues=len(offsets), error=str(error))
            return
        for queue in saved:
            self._stored[queue] = offsets[queue]
            if self._again_s.get(queue, math.inf) < now_s:
                del self._again_s[queue]
            self._asked.pop(queue, None)


OLD_MESSAGES_S: Final = 10.0
"""RocketMQ's pause: for so long listeners may finish before new messages are handed out."""


@dataclass(eq=False, repr=False)
class OffsetReset:
    """Resets the queues of one consumer, one request after the other."""

    _owned: OwnedQueues
    _offsets: QueueOffsets
    suspend: Callable[[], None]
    resume: Callable[[], None]

    def __post_init__(self) -> None:
        # Of queues owned at the time of the reset; the newest offset of each.
        self._asked: dict[MessageQueue, int] = {}
        self._is_asked = trio.Event()

    def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Make the owned queues go on at *offsets*; the others belong to other clients."""
        ours = {q: offset for q, offset in offsets.items() if self._owned.any_of(q) is not None}
        if ours:
            self._asked |= ours
            self._is_asked.set()

    async def run(self) -> None:
        """Carry out resets until cancelled."""
        while True:
            await self._is_asked.wait()
            self._is_asked = trio.Event()
            asked, self._asked = self._asked, {}
            self.suspend()
            try:
                await self._reset(asked)
            finally:
                self.resume()

    async def _reset(self, moves: Mapping[MessageQueue, int]) -> None:
        wanted = [
            (owned, offset)
            for queue, offset in moves.items()
            if (owned := self._owned.any_of(queue)) is not None
        ]
        old = [(owned, owned.messages) for owned, _ in wanted]
        await self._offsets.reset(wanted)
        for owned, offset in wanted:
            owned.count("offset_reset")
            _log.info("offset_reset", queue=str(owned.queue), offset=offset)
        with trio.move_on_after(OLD_MESSAGES_S):
            for owned, messages in old:
                while messages is not None and messages.in_hand and not owned.is_dropped:
                    await owned.change()
