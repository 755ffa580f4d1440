"""Topics of brokers: where queues begin and end, their messages, and rows that become messages.

Rows are written at least once. A task that Spark runs again sends its rows again.

A row's `idempotent_key` is stored with its message, so that a reader can recognise the copies of
one row from different rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from dledger.client.blocking import BlockingClient, BlockingFuture, BlockingPullConsumer
from dledger.client.core.errors import ClientError, OffsetIllegalError, RequestFailedError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, PullStatus
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.commitlog.errors import MQError
from dledger.remoting.log import log_warnings_as_text
from dledger.spark_jobs.datasource.options import Bounds, OptionError, Options, QueueRange

# ---------------------------------------------------------------------------------- read


PULL_MESSAGES: Final = 4096
"""Asked for at a time; the broker has limits of its own."""
PAUSE_S: Final = 0.2
"""Between two attempts without a leader: an election takes about a second."""

T = TypeVar("T")


def open_client(namesrv: str) -> BlockingClient:
    """Return a client of a process that Spark started; of its logs only warnings are kept."""
    log_warnings_as_text()
    return BlockingClient(namesrv)


class DataLostError(ClientError):
    """Messages that were to be read were removed; the query stops so that it is noticed."""


class TopicReader:
    """Reads topics through one client; open it with ``with``, in the process that reads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._client = open_client(options.namesrv)
        self._consumer: BlockingPullConsumer | None = None

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Idempotent."""
        self._client.close()

    def bounds(self) -> list[QueueRange]:
        """Return every queue of the topics, from its first offset to its present end.

        Raises:
            NoRouteError: A topic is not known.
            ClientError: There was no answer in time.
        """
        admin = self._client.admin()
        return sorted(
            QueueRange(queue.topic, queue.broker_name, queue.queue_id, first, end)
            for topic in self._options.topics
            for queue, (first, end) in self._again(lambda topic=topic: admin.offsets(topic)).items()  # type: ignore[misc]
        )

    def within_times(self, ranges: Iterable[QueueRange], bounds: Bounds) -> list[QueueRange]:
        """Return what of *ranges* was stored in the times of *bounds*."""
        ranges = list(ranges)
        if not bounds.has_times:
            return ranges
        found = []
        for one in ranges:
            begin, end = one.begin, one.end
            if bounds.from_ms > 0:
                begin = max(begin, self._search(one, bounds.from_ms))
            if bounds.until_ms <= 0:
                end = begin
            elif bounds.until_ms < _MAX_MS:
                end = min(end, self._search(one, bounds.until_ms))
            found.append(QueueRange(one.topic, one.broker, one.queue_id, begin, max(begin, end)))
        return found

    def _search(self, one: QueueRange, time_ms: int) -> int:
        queue = MessageQueue(one.topic, one.broker, one.queue_id)
        return self._again(lambda: self._pulling().search_offset(queue, time_ms))

    def read(self, one: QueueRange) -> Iterator[Sequence[MessageExt]]:
        """Yield the messages of a range in order, in pieces, each once.

        Raises:
            DataLostError: Retention has taken some of them, or the queue has less than it had.
            ClientError: There was no answer in time.
        """
        queue = MessageQueue(one.topic, one.broker, one.queue_id)
        offset = one.begin
        deadline = time.monotonic() + self._options.timeout_s
        while offset < one.end:
            wanted = min(PULL_MESSAGES, one.end - offset)
            try:
                result = self._again(
                    lambda at=offset, count=wanted: self._pulling().pull(  # type: ignore[misc]
                        queue, at, max_messages=count, timeout_s=0, with_expired=True
                    )
                )
            except OffsetIllegalError as error:
                offset = self._moved(one, offset, error)
                continue
            messages = [m for m in result.messages if offset <= m.queue_offset < one.end]
            if messages:
                yield messages
                offset = messages[-1].queue_offset + 1
                deadline = time.monotonic() + self._options.timeout_s
            elif result.status is PullStatus.NO_NEW_MESSAGE or result.next_begin_offset <= offset:
                if time.monotonic() > deadline:
                    raise DataLostError(
                        f"{one.name} ends at {result.max_offset}, but offset {one.end - 1} was "
                        "there before: was the topic deleted and made again?"
                    )
                time.sleep(PAUSE_S)
            else:
                offset = result.next_begin_offset

    def _moved(self, one: QueueRange, offset: int, error: OffsetIllegalError) -> int:
        if error.min_offset <= offset:
            raise DataLostError(f"{one.name}: {error}; was the topic deleted?") from error
        if self._options.fail_on_data_loss:
            raise DataLostError(
                f"{one.name}: offsets {offset} to {error.min_offset - 1} are missing, retention"
                " took them; failOnDataLoss=false goes on without them"
            ) from error
        return min(error.min_offset, one.end)

    def _pulling(self) -> BlockingPullConsumer:
        if self._consumer is None:
            self._consumer = self._client.pull_consumer(self._options.group)
        return self._consumer

    def _again(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer: reading twice does no harm."""
        deadline = time.monotonic() + self._options.timeout_s
        while True:
            try:
                return ask()
            except OffsetIllegalError:
                raise
            except MQError as error:
                again = error.retriable or isinstance(error, RequestFailedError)
                if not again or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)


_MAX_MS: Final = 1 << 53


# ---------------------------------------------------------------------------------- written


IN_FLIGHT: Final = 2_000
"""Sends under way at a time: enough that they leave in large requests."""
IDEMPOTENT_KEY: Final = "IDEMPOTENT_KEY"
"""Property that holds a row's own key."""
GROUP: Final = "spark-writers"
COLUMNS: Final = frozenset({"topic", "body", "tags", "keys", "properties", "idempotent_key"})


@dataclass
class Sent(WriterCommitMessage):
    """How many messages a task has stored."""

    messages: int


def check_columns(options: Options, columns: Sequence[str]) -> None:
    """Refuse rows that are no messages.

    Raises OptionError: names the column that is missing or not known.
    """
    unknown = sorted(set(columns) - COLUMNS)
    if unknown:
        raise OptionError(
            f"column {unknown[0]} is no part of a message; there are {', '.join(sorted(COLUMNS))}"
        )
    if "body" not in columns:
        raise OptionError("column body is missing: the message itself, a string or bytes")
    if "topic" not in columns and not options.topics:
        raise OptionError("name the topic: by the option topic or by a column of that name")


def message_of(row: dict[str, Any], topic: str) -> Message:
    """Return the message a row stands for."""
    body = row["body"]
    properties = dict(row.get("properties") or ())
    keys = row.get("keys") or ""
    own = row.get("idempotent_key")
    if own:
        properties[IDEMPOTENT_KEY] = str(own)
        keys = f"{keys} {own}".strip()
    return Message(
        row.get("topic") or topic,
        body.encode() if isinstance(body, str) else body,
        tags=row.get("tags") or "",
        keys=keys,
        properties=properties or None,
    )


def send_rows(options: Options, batches: Iterator[Any]) -> Sent:
    """Send every row and wait until all are stored.

    Raises ClientError: one was not; some of the others are, and come again when Spark tries again.
    """
    topic = options.topics[0] if options.topics else ""
    sent = 0
    waiting: deque[BlockingFuture] = deque()
    config = ProducerConfig(send_timeout_s=options.timeout_s)
    with open_client(options.namesrv) as client:
        producer = client.producer(GROUP, config)
        for batch in batches:
            for row in batch.to_pylist():
                if len(waiting) >= IN_FLIGHT:
                    waiting.popleft().result()
                waiting.append(producer.send_async(message_of(row, topic)))
                sent += 1
        while waiting:
            waiting.popleft().result()
    return Sent(sent)


class _Writer:
    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        check_columns(options, columns)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task."""
        return send_rows(self._options, iterator)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Sends the rows of a batch."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Sends the rows of a stream."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: what is stored is stored."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: what is stored stays, and comes again with the next attempt."""
