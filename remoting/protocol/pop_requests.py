"""Headers, bodies and receipt handles of POP, and of the assignment of queues by a broker.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.bodies import Body, MessageModel, MessageQueue
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.headers import I32, I64, Header

INIT_MIN: Final = 0
"""`initMode`: a group without an offset begins where the queue begins."""
INIT_MAX: Final = 1
"""`initMode`: it begins where the queue ends."""

MAX_BITS: Final = 1 << 16
"""Of the set of offsets in one item of a batch of acknowledgements, as our clients write it."""

MAX_READ_BITS: Final = 1 << 22
"""Of one that is read: a client of RocketMQ writes one item for a grant, however far apart its
messages stand. Half a megabyte, a few milliseconds of reading; no more than `MAX_BITS` of them may
be set."""

MAX_REQUEST_BITS: Final = 2 * MAX_READ_BITS
"""Of all items of one batch of acknowledgements together, set or not: a megabyte, ten
milliseconds of reading, or eighty as a list. Without it one frame of items that name no message
stalls a broker."""

_SET_BYTE: Final = re.compile(rb"[^\0]", re.DOTALL)


class PopMessageHeader(Header):
    """POP_MESSAGE (200050)."""

    consumer_group: str
    topic: str
    queue_id: I32
    max_msg_nums: I32
    invisible_time: I64
    poll_time: I64
    born_time: I64
    init_mode: I32
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


class PopMessageResponseHeader(Header):
    """What a client puts the handles together from."""

    pop_time: I64 = 0
    invisible_time: I64 = 0
    revive_qid: I32 = 0
    rest_num: I64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessageHeader(Header):
    """ACK_MESSAGE (200051)."""

    consumer_group: str
    topic: str
    queue_id: I32
    extra_info: str
    offset: I64


class ChangeInvisibleTimeHeader(Header):
    """CHANGE_MESSAGE_INVISIBLETIME (200053)."""

    consumer_group: str
    topic: str
    queue_id: I32
    extra_info: str
    offset: I64
    invisible_time: I64


class ChangeInvisibleTimeResponseHeader(Header):
    """What the new handle is made of."""

    pop_time: I64
    invisible_time: I64
    revive_qid: I32


class NotificationHeader(Header):
    """NOTIFICATION (200054)."""

    consumer_group: str
    topic: str
    queue_id: I32
    poll_time: I64
    born_time: I64
    order: bool | None = None
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class PollingInfoHeader(Header):
    """POLLING_INFO (200055)."""

    consumer_group: str
    topic: str
    queue_id: I32


# ---------------------------------------------------------------------------- offsets of an answer


def encode_offsets(offsets: Mapping[int, list[int]]) -> tuple[str, str]:
    """Return `startOffsetInfo` and `msgOffsetInfo` of messages, by queue."""
    starts = ";".join(f"0 {queue_id} {min(found)}" for queue_id, found in offsets.items())
    messages = ";".join(
        f"0 {queue_id} {','.join(map(str, found))}" for queue_id, found in offsets.items()
    )
    return starts, messages


def decode_start_offsets(text: str) -> dict[tuple[str, int], int]:
    """Return topic flag and queue id → first offset of an answer's `startOffsetInfo`.

    Raises BadRequestError: it is none.
    """
    try:
        items = [item.split(" ") for item in text.split(";")] if text else []
        return {(flag, whole_number(queue)): whole_number(start) for flag, queue, start in items}
    except ValueError:
        raise BadRequestError(f"no startOffsetInfo: {text[:64]!r}") from None


# ---------------------------------------------------------------------------------- bodies


class BatchAck(msgspec.Struct):
    """Messages of one grant in one queue."""

    c: str = ""
    t: str = ""
    r: str = "0"
    so: int = 0
    q: int = 0
    rq: int = 0
    pt: int = 0
    it: int = 0
    b: Any = ""
    """Bit *n*: the message at the start offset plus *n*. Base64 of the bytes, lowest bit first; or
    a list of the bytes as newer writers have them."""

    @property
    def bits(self) -> int:
        """How many bits reading takes, set or not; known without reading them."""
        if isinstance(self.b, str):
            return 8 * (len(self.b) // 4 * 3 - self.b[-2:].count("="))
        return 8 * len(self.b) if isinstance(self.b, list) else 0

    @property
    def offsets(self) -> list[int]:
        """The offsets of the messages.

        Raises BadRequestError: they are written in no form that is known, or too many.
        """
        if self.bits > MAX_READ_BITS:
            raise BadRequestError(f"a batch has {self.bits} bits, at most {MAX_READ_BITS}")
        try:
            data = (
                b64decode(self.b, validate=True)
                if isinstance(self.b, str)
                else bytes(n & 0xFF if -129 < n < 256 else n for n in map(whole_number, self.b))
            )
        except (TypeError, ValueError, OverflowError):
            raise BadRequestError("the bits of acknowledged messages are unreadable") from None
        count = int.from_bytes(data, "little").bit_count()
        if count > MAX_BITS:
            raise BadRequestError(f"a batch names {count} messages, at most {MAX_BITS}")
        return [
            self.so + 8 * found.start() + bit
            for found in _SET_BYTE.finditer(data)
            for bit in range(8)
            if data[found.start()] >> bit & 1
        ]

    @classmethod
    def encode_offsets(cls, start: int, offsets: Iterable[int]) -> str:
        """Return the bits of *offsets*, none of them below *start*."""
        bits = 0
        for offset in offsets:
            bits |= 1 << (offset - start)
        return b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode()


class BatchAckMessageRequestBody(Body):
    """Body of BATCH_ACK_MESSAGE (200151)."""

    broker_name: str = ""
    acks: list[BatchAck] = []


class QueryAssignmentRequestBody(Body):
    """Body of QUERY_ASSIGNMENT (400)."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = ""
    message_model: MessageModel = MessageModel.CLUSTERING


class MessageQueueAssignment(Body):
    """A queue of one consumer, and how it gets its messages."""

    message_queue: MessageQueue
    mode: str
    attachments: dict[str, str] | None = None


class QueryAssignmentResponseBody(Body):
    """What a broker assigns to one consumer."""

    message_queue_assignments: list[MessageQueueAssignment] = []


class SetMessageRequestModeRequestBody(Body):
    """Body of SET_MESSAGE_REQUEST_MODE (401)."""

    topic: str = ""
    consumer_group: str = ""
    mode: str = "PULL"
    pop_share_queue_num: int = 0


class MessageRequestModes(Body):
    """Answer of GET_ALL_MESSAGE_REQUEST_MODE (402): topic → consumer group → mode."""

    message_request_mode_map: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}


# ------------------------------------------------------------------------------------- receipts


PROPERTY_POP_CK: Final = "POP_CK"
"""Property under which a client keeps the handle of a message."""

NORMAL_TOPIC: Final = "0"

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
    """One message that is out, as its consumer names it: eight words, or nine.

    Form: ``startOffset popTime invisibleTime reviveQid topicFlag brokerName queueId
    msgQueueOffset``. RocketMQ's proxy adds the position in the log. Our brokers have no revive
    queues: that field names the grant. Numbers below 1,000 are revive queues of RocketMQ's brokers,
    where 999 stands for FIFO.
    """

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
