"""Where the offsets of a consumer group are kept: on the brokers, or in a file of this machine.

A group that shares its queues keeps them on the brokers, for whoever takes a queue over. Consumers
that each see every message keep their own.

Spec: semantics fact sheet, section 6; remoting, section 8.5.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import trio

from client.core.client_instance import ClientInstance
from client.core.errors import RequestFailedError, RequestTimedOutError
from client.core.route import MessageQueue
from commitlog.errors import ConfigError, MQError
from commitlog.seams import Disk
from remoting.log import get_logger
from remoting.protocol import bodies
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.headers import (
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from remoting.protocol.lock_tokens import TOKEN_FIELD
from remoting.protocol.outcome import outcome_of
from remoting.seams import Executor

COMMIT_TIMEOUT_S: Final = 5.0
"""For one offset; the next round brings it again."""
MAX_COMMITS_AT_ONCE: Final = 64
"""Commits of one round that are out together."""
OFFSETS_FILE: Final = "offsets.json"
DEFAULT_INSTANCE: Final = "DEFAULT"
"""Stands in a path for a client without a name: what it gets is another one each time."""

_log = get_logger(__name__)


class OffsetStore(Protocol):
    """Keeps an offset per queue."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return what was stored, or None when nothing ever was.

        Raises:
            ClientError: Nobody says; that is not the same as nothing.
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
    ) -> None:
        """Keep the offsets of *group*.

        Args:
            token: Fencing token under which a queue is consumed; a broker stores nothing under an
                old one.
        """
        self._instance = instance
        self._group = group
        self._token = token

    async def load(self, queue: MessageQueue) -> int | None:
        """Return what the group has committed last, as stored, never an old answer.

        A queue that is young and whole begins at 0 although nobody committed that, as in RocketMQ.

        Raises:
            ClientError: See `OffsetStore`.
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
            raise RequestFailedError(
                f"{queue}: no offset: code {answer.code} {answer.remark or ''}",
                code=answer.code,
                remark=answer.remark or "",
            )
        return OffsetResponseHeader.decode(answer.ext).offset

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """See `OffsetStore`. Our brokers answer when an offset is in the log."""
        saved: set[MessageQueue] = set()
        limiter = trio.CapacityLimiter(MAX_COMMITS_AT_ONCE)

        async def commit(queue: MessageQueue, offset: int) -> None:
            async with limiter:
                try:
                    await self._commit(queue, offset)
                except MQError as error:
                    _log.info("offset_not_committed", queue=str(queue), error=str(error))
                else:
                    saved.add(queue)

        async with trio.open_nursery() as nursery:
            for queue, offset in offsets.items():
                nursery.start_soon(commit, queue, offset)
        return saved

    async def _commit(self, queue: MessageQueue, offset: int) -> None:
        header = UpdateConsumerOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
        token = self._token(queue)
        shown = {} if token is None else {TOKEN_FIELD: str(token)}
        answer = await self._instance.ask_leader(
            queue.broker_name,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {**header.encode(), "sync": "true", **shown},
            topic=queue.topic,
            timeout_s=COMMIT_TIMEOUT_S,
        )
        if answer.code != ResponseCode.SUCCESS:
            kind = RequestTimedOutError if outcome_of(answer) == "unknown" else RequestFailedError
            raise kind(
                f"{queue}: commit of {offset}: code {answer.code} {answer.remark or ''}",
                code=answer.code,
                remark=answer.remark or "",
            )


class LocalOffsets:
    """Offsets in a JSON file, in the form of RocketMQ's Java client. The file is replaced whole."""

    def __init__(self, disk: Disk, executor: Executor, path: str) -> None:
        """Keep offsets in the file *path*; it need not exist yet."""
        self._disk = disk
        self._executor = executor
        self._path = path
        self._offsets: dict[MessageQueue, int] | None = None
        self._lock = trio.Lock()

    async def load(self, queue: MessageQueue) -> int | None:
        """See `OffsetStore`.

        Raises:
            ConfigError: The file is none of offsets; it is left as it is.
        """
        async with self._lock:
            return (await self._known()).get(queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """See `OffsetStore`. Durable when it returns.

        Raises:
            MQError, OSError: The disk said no; the file is as it was.
        """
        async with self._lock:
            known = {**await self._known(), **offsets}
            table = {
                bodies.MessageQueue(q.topic, q.broker_name, q.queue_id): offset
                for q, offset in known.items()
            }
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
    return {MessageQueue(q.topic, q.broker_name, q.queue_id): at for q, at in table.items()}


def offsets_path(folder: str, client_ip: str, instance_name: str, group: str) -> str:
    """Return the file for the offsets of a broadcasting *group* below *folder*."""
    client = f"{client_ip}@{instance_name or DEFAULT_INSTANCE}"
    return posixpath.join(folder, client, group, OFFSETS_FILE)
