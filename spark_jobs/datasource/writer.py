"""Rows as messages: at least once. A task that Spark runs again sends its rows again.

A row's `idempotent_key` is stored with its message, so that a reader can recognise the copies of
one row from different rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from client.blocking import BlockingFuture
from client.core.message import Message
from client.producer.config import ProducerConfig
from spark_jobs.datasource.network import open_client
from spark_jobs.datasource.options import OptionError, Options

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

    Raises:
        OptionError: Names the column that is missing or not known.
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

    Raises:
        ClientError: One was not; some of the others are, and come again when Spark tries again.
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


class BatchWriter(DataSourceArrowWriter):
    """Sends the rows of a batch."""

    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        check_columns(options, columns)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task."""
        return send_rows(self._options, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of a stream."""

    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        check_columns(options, columns)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task."""
        return send_rows(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: what is stored is stored."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: what is stored stays, and comes again with the next attempt."""
