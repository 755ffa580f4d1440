"""The handle that a POP consumer acknowledges a message with: eight words, or nine. Pure.

Form: ``startOffset popTime invisibleTime reviveQid topicFlag brokerName queueId msgQueueOffset``.
RocketMQ's proxy adds the position in the log. Our brokers have no revive queues: that field names
the grant. Numbers below 1,000 are revive queues of RocketMQ's brokers, where 999 stands for FIFO.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.header_codec import whole_number

PROPERTY_POP_CK: Final = "POP_CK"
"""Property under which a client keeps the handle of a message."""

NORMAL_TOPIC: Final = "0"
RETRY_TOPIC: Final = "1"

_FIRST: Final = 1_000
_RANGE: Final = (1 << 31) - _FIRST
_WORDS: Final = 8
_WORDS_OF_A_PROXY: Final = 9
MAX_HANDLE_CHARS: Final = 1_024
"""Longer than any broker's name makes it."""


def revive_queue_of(token: int) -> int:
    """Return the number that stands for a grant; with the time of the grant it is exact."""
    return _FIRST + token % _RANGE


@dataclass(frozen=True, slots=True)
class ReceiptHandle:
    """One message that is out, as its consumer names it."""

    start_offset: int
    pop_time_ms: int
    invisible_ms: int
    revive_queue_id: int
    broker_name: str
    queue_id: int
    offset: int
    topic_flag: str = NORMAL_TOPIC

    def encode(self) -> str:
        """Return the handle in one line."""
        return (
            f"{self.start_offset} {self.pop_time_ms} {self.invisible_ms} {self.revive_queue_id} "
            f"{self.topic_flag} {self.broker_name} {self.queue_id} {self.offset}"
        )

    @classmethod
    def decode(cls, text: str) -> ReceiptHandle:
        """Return what `encode` made, or a client of RocketMQ.

        Raises BadRequestError: it is none.
        """
        words = text.split(" ") if len(text) <= MAX_HANDLE_CHARS else []
        if len(words) not in (_WORDS, _WORDS_OF_A_PROXY):
            raise BadRequestError(f"a receipt handle has {_WORDS} words, not {len(words)}")
        start, popped, invisible, revive, flag, name, queue_id, offset = words[:_WORDS]
        try:
            return cls(
                whole_number(start),
                whole_number(popped),
                whole_number(invisible),
                whole_number(revive),
                name,
                whole_number(queue_id),
                whole_number(offset),
                flag,
            )
        except ValueError:
            raise BadRequestError("a word of the receipt handle is no number") from None
