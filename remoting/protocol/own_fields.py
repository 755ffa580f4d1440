"""Ext fields of ours on requests of RocketMQ: confirmations, lock tokens, producer stamps.

A request that gives up messages is refused, with what would go in a field, until the same request
comes with `CONFIRMED_FIELD`. A lock request that carries `TOKENS_FIELD` gets one token per granted
queue back, in the order of the body's list; pulls and offset commits show theirs in `TOKEN_FIELD`.
A step of a consumer names in `COMMITS_FIELD` the offsets that it moves, and from where. A commit
with `BY_OPERATOR_FIELD` is one that an operator wants. The answer of a broker that would make a
consumer group carries `NOT_MADE_FIELD`. A receive with `FROM_NOW_FIELD` gets nothing of before.
`UNSEEN_FIELD` gives a message back that no consumer got. A
batch of acknowledgements that is refused in part names in `STALE_FIELD` those that are stale.

An idempotent producer stamps a send, so that the broker stores it once. In SEND_RECORDS the stamp
is one CBOR field, ``producer`` = [id, epoch, sequence, first open]; in 10, 310 and 320 four text
fields, the id in hexadecimal.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.command import ExtFields
from dledger.remoting.protocol.header_codec import whole_number

# -------------------------------------------------------------------------------- offset commits


BY_OPERATOR_FIELD: Final = "byOperator"
"""Of UPDATE_CONSUMER_OFFSET: `true`, it is an administrative act, and has an audit line."""


# ------------------------------------------------------------------------------ expired messages


WITH_EXPIRED_FIELD: Final = "withExpired"
"""Of a pull; `true`: messages that have expired, too."""


# --------------------------------------------------------------------------------- consumer groups

NOT_MADE_FIELD: Final = "groupNotMade"
"""Of the answer to GET_SUBSCRIPTIONGROUP_CONFIG: `true`, there is no such group at this broker; the
body is what it gets at its first pull."""

FROM_NOW_FIELD: Final = "fromNow"
"""Of POP_MESSAGE whose `initMode` is 1: `true`, a new group begins at the end of each queue, young
or not. RocketMQ's brokers let it begin with the first message of a young one."""

UNSEEN_FIELD: Final = "unseen"
"""Of CHANGE_MESSAGE_INVISIBLETIME: `true`, no consumer got the message; it is no attempt."""


# ---------------------------------------------------------------------------------- stale receipts


NAMES_STALE_FIELD: Final = "staleReceipts"
"""Of the answer to CAPABILITIES: `true`, a batch of acknowledgements that is refused in part names
those that are stale."""

STALE_FIELD: Final = "staleReceipts"
"""Of the answer 208 to BATCH_ACK_MESSAGE: the places of stale messages, with commas."""


def encode_stale(accepted: Iterable[bool]) -> str:
    """Return which messages of a batch are stale, as one ext field.

    *accepted*: for each message whether it is acknowledged: the items in the order of the request,
    in each the lowest offset first.
    """
    return ",".join(str(place) for place, is_done in enumerate(accepted) if not is_done)


def decode_stale(text: object, count: int) -> frozenset[int]:
    """Return the places of stale messages in a batch of *count*.

    Raises BadRequestError: not a list of places in the batch, or of none.
    """
    try:
        places = frozenset(whole_number(part) for part in str(text).split(","))
    except ValueError:
        places = frozenset()
    if not places or min(places) < 0 or max(places) >= count:
        raise BadRequestError(f"{STALE_FIELD} names no places of {count}: {str(text)[:32]!r}")
    return places


# ----------------------------------------------------------------------------------- consumer steps


COMMITS_FIELD: Final = "commits"
"""Of CONSUME_STEP: list of [topic, queue id, offset before, offset behind]."""

COMMITTED_FIELD: Final = "committedOffset"
"""Of its refusal: the offset that the group has in a queue."""

NO_OFFSET: Final = -1
"""As the offset before: the group has committed nothing in that queue."""

STEP_COMMITS_MAX: Final = 4096
"""Queues of one step: as many as a request may have runs."""


class StepCommit(NamedTuple):
    """A queue of which a step consumes the messages from one offset to another."""

    topic: str
    queue_id: int
    before: int
    behind: int


def step_commits_of(ext: ExtFields) -> tuple[StepCommit, ...]:
    """Return the offsets of a step, each queue once.

    Raises BadRequestError: there are none, too many, or what is there is something else.
    """
    value: object = ext.get(COMMITS_FIELD)
    if not isinstance(value, list) or not 0 < len(value) <= STEP_COMMITS_MAX:
        raise BadRequestError(f"{COMMITS_FIELD} must be a list of 1 to {STEP_COMMITS_MAX}")
    found = tuple(map(_step_commit, value))
    if len({(commit.topic, commit.queue_id) for commit in found}) < len(found):
        raise BadRequestError("a step commits an offset of each queue once")
    return found


def _step_commit(item: object) -> StepCommit:
    if not isinstance(item, list) or len(item) != 4 or type(item[0]) is not str:
        raise BadRequestError("a commit is [topic, queue id, offset before, offset behind]")
    topic, *numbers = item
    if any(type(number) is not int for number in numbers):
        raise BadRequestError("a commit is [topic, queue id, offset before, offset behind]")
    commit = StepCommit(topic, *numbers)
    if (
        not 0 <= commit.queue_id <= 0x7FFFFFFF
        or not NO_OFFSET <= commit.before <= commit.behind <= _MAX
        or commit.behind < 0
    ):
        raise BadRequestError(
            f"a step from offset {commit.before} to {commit.behind} of queue {commit.queue_id}"
        )
    return commit


# ------------------------------------------------------------------------------- confirmed requests


CONFIRMED_FIELD: Final = "dledgerConfirmed"
"""Of a request; `true`: what it gives up has been shown and is agreed to."""

GIVES_UP_FIELD: Final = "dledgerGivesUp"
"""Of a refusal: `GivenUp` as JSON."""

TOPICS_SHOWN: Final = 50
"""Topics named in it, those with most messages: a header field is no report."""


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """What would be given up now, on every replica.

    Attributes:
        change: The setting and its values before and after, for people.
        segments: Files of the log; 0 where queues of a topic only begin later.
        newest_ms: Store time of the newest message that goes; 0: none goes.
        messages: By topic, at most `TOPICS_SHOWN` of them.
        other_topics: Topics with messages that go beside those.
        uncounted_queues: Queues that were not read, because there are too many.
    """

    change: str
    segments: int = 0
    size_bytes: int = 0
    newest_ms: int = 0
    messages: dict[str, int] = {}
    other_topics: int = 0
    other_messages: int = 0
    uncounted_queues: int = 0

    @property
    def total(self) -> int:
        """Messages that go, as far as they were counted."""
        return sum(self.messages.values()) + self.other_messages

    def encode(self) -> str:
        """Return it as it stands in the field."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        """Return it in one sentence."""
        at_least = "at least " if self.uncounted_queues else ""
        return (
            f"{self.change} gives up {at_least}{self.total} messages that are kept now"
            f" ({self.segments} segments, {self.size_bytes} bytes), and others sooner than agreed"
        )


class Unreadable(GivenUp, frozen=True):
    """Messages that could not be read any more, until there are as many queues again."""

    def __str__(self) -> str:
        """Return it in one sentence."""
        return f"{self.change} leaves {self.total} messages that nothing reads"


def decode_given_up(text: str) -> GivenUp:
    """Return what would be removed, as a refusal lists it.

    Raises msgspec.MsgspecError: it is no such text.
    """
    return msgspec.json.decode(text, type=GivenUp)


def given_up(
    change: str, messages: dict[str, int], *, uncounted_queues: int = 0, **size: int
) -> GivenUp:
    """Return it with the largest topics named and the others summed up. Pure."""
    largest = sorted(messages.items(), key=lambda item: (-item[1], item[0]))
    named, others = largest[:TOPICS_SHOWN], largest[TOPICS_SHOWN:]
    return GivenUp(
        change=change,
        messages=dict(named),
        other_topics=len(others),
        other_messages=sum(count for _, count in others),
        uncounted_queues=uncounted_queues,
        **size,
    )


# -------------------------------------------------------------------- fencing tokens of queue locks


TOKENS_FIELD: Final = "lockTokens"
TOKEN_FIELD: Final = "lockToken"
WANTED: Final = "wanted"
"""What a lock request has in `TOKENS_FIELD`."""


def encode_tokens(tokens: Iterable[int]) -> str:
    """Return tokens as one ext field."""
    return ",".join(map(str, tokens))


def decode_tokens(text: object) -> tuple[int, ...]:
    """Return the tokens in an ext field. Raises BadRequestError: not a list of whole numbers."""
    try:
        return tuple(whole_number(part) for part in str(text).split(",") if part)
    except ValueError as error:
        raise BadRequestError(f"{TOKENS_FIELD} is no list of tokens: {text!r}") from error


def shown_token(ext: ExtFields) -> int | None:
    """Return the token a request shows, None when it shows none.

    Raises BadRequestError: it is no number.
    """
    value = ext.get(TOKEN_FIELD)
    if value is None:
        return None
    try:
        return whole_number(value)
    except ValueError as error:
        raise BadRequestError(f"{TOKEN_FIELD} is no token: {value!r}") from error


# ------------------------------------------------------------------- stamps of idempotent producers


STAMP_FIELD: Final = "producer"
ID_FIELD: Final = "producerId"
EPOCH_FIELD: Final = "producerEpoch"
SEQUENCE_FIELD: Final = "producerSequence"
FIRST_OPEN_FIELD: Final = "producerFirstOpen"

PRODUCER_ID_BYTES: Final = 16
OPEN_SEQUENCES_MAX: Final = 64
"""Sequences of one session that may be open at the same time: it bounds what is remembered."""
_MAX: Final = (1 << 63) - 1


class ProducerStamp(NamedTuple):
    """Which send of which producer this is.

    Attributes:
        producer_id: 16 random bytes, the producer's own while it is open.
        epoch: As the broker group gave it when the session was opened.
        first_open: Lowest sequence whose outcome the producer still waits for.
    """

    producer_id: bytes
    epoch: int
    sequence: int
    first_open: int

    def as_field(self) -> list[bytes | int]:
        """Return the value of the CBOR field."""
        return [self.producer_id, self.epoch, self.sequence, self.first_open]

    def as_texts(self) -> dict[str, str]:
        """Return the text fields."""
        return {
            ID_FIELD: self.producer_id.hex(),
            EPOCH_FIELD: str(self.epoch),
            SEQUENCE_FIELD: str(self.sequence),
            FIRST_OPEN_FIELD: str(self.first_open),
        }


def stamp_of_field(ext: ExtFields) -> ProducerStamp | None:
    """Return the stamp in the CBOR field, None when there is none.

    Raises BadRequestError: there is something else.
    """
    value = ext.get(STAMP_FIELD)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 4:
        raise BadRequestError("producer is [id, epoch, sequence, first open]")
    return _checked(*value)


def stamp_of_texts(ext: ExtFields) -> ProducerStamp | None:
    """Return the stamp in the text fields, None when there is none.

    Raises BadRequestError: there is something else.
    """
    if ID_FIELD not in ext:
        return None
    try:
        return _checked(
            bytes.fromhex(ext[ID_FIELD]),
            *map(whole_number, (ext[EPOCH_FIELD], ext[SEQUENCE_FIELD], ext[FIRST_OPEN_FIELD])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequestError(
            f"{ID_FIELD} is hexadecimal, {EPOCH_FIELD}, {SEQUENCE_FIELD} and {FIRST_OPEN_FIELD}"
            " are numbers"
        ) from error


def producer_id_of(value: object) -> bytes:
    """Return the producer id written as *value*, bytes or hexadecimal.

    Raises BadRequestError: it is none.
    """
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError as error:
            raise BadRequestError(f"a producer id that cannot be read: {error}") from error
    if type(value) is not bytes or len(value) != PRODUCER_ID_BYTES:
        raise BadRequestError(f"a producer id has {PRODUCER_ID_BYTES} bytes")
    return value


def _checked(
    producer_id: object, epoch: object, sequence: object, first_open: object
) -> ProducerStamp:
    known = producer_id_of(producer_id)
    if (
        type(epoch) is not int
        or type(sequence) is not int
        or type(first_open) is not int
        or not 0 < epoch <= _MAX
        or not 0 <= first_open <= sequence <= _MAX
    ):
        raise BadRequestError(f"epoch {epoch}, sequence {sequence}, first open {first_open}")
    return ProducerStamp(known, epoch, sequence, first_open)
