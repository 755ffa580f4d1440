"""Where a consumer begins in a queue.

Spec: semantics fact sheet, section 6; remoting, section 8.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from client.consumer.delivered_message import RETRY_PREFIX
from client.consumer.pull_consumer import PullConsumer
from client.core.route import MessageQueue
from remoting.protocol.bodies import ConsumeFromWhere

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
    """Return where to begin in a queue whose offset nobody has stored.

    Args:
        now_ms: The date, for a beginning that is not named.
    Raises:
        ClientError: Nobody says; asking again may help.
    """
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    if begin.where in _FIRST:
        # What is kept may begin later: the broker says where, at the first pull.
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
