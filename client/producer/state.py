"""Where a send stands, and what follows a request that failed. Pure.

A send waits, is in flight, and is settled exactly once: stored, failed or abandoned. Between two
attempts `NEXT` has what becomes of the request that held it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Final

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    RequesterAwayError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.retry import Failure, FailureKind, RetryPolicy, RetrySchedule
from dledger.client.core.route import MessageQueue
from dledger.remoting.protocol.codes import ResponseCode

if TYPE_CHECKING:
    import trio


class SlotState(IntEnum):
    """Where a send stands."""

    WAITING = 0
    IN_FLIGHT = 1
    STORED = 2
    FAILED = 3
    ABANDONED = 4


@dataclass(eq=False, repr=False, slots=True)
class SendSlot:
    """One send (a message, or a batch for one queue) on its way to its own result.

    A slot is settled exactly once: STORED, FAILED or ABANDONED.

    Attributes:
        message: What the caller gave; a sequence for a batch.
        queue: Where to.
        message_ids: UNIQ_KEY of the message, or of each message of the batch.
        records: All records back to back.
        sizes: Their sizes as u32 big-endian.
        count: How many.
        deadline: Monotonic seconds at which the caller gives up.
        pinned: The queue was chosen by the caller; never moved to another one.
        place: In the line of its group, in the order of offers.
        reason: Why the newest attempt failed, while another one is to follow.
    """

    message: Message | Sequence[Message]
    queue: MessageQueue
    message_ids: str | tuple[str, ...]
    records: bytes
    sizes: bytes
    count: int
    deadline: float
    pinned: bool
    state: SlotState = SlotState.WAITING
    sent: bool = False
    base_offset: int = -1
    phy_offset: int = -1
    store_host: bytes = b""
    grown_bytes: int = 0
    error: ClientError | None = None
    schedule: RetrySchedule | None = None
    task: trio.lowlevel.Task | None = None
    status: int = 0
    offset_message_id: str | None = None
    recall_handle: str = ""
    place: int = 0
    reason: str = ""

    def schedule_under(self, policy: RetryPolicy) -> RetrySchedule:
        """Return the attempts of this send, from its first failure on."""
        if self.schedule is None:
            self.schedule = RetrySchedule(policy, self.deadline)
        return self.schedule

    @property
    def settled(self) -> bool:
        """Whether the result is there, or no sender waits for it any more."""
        return self.state >= SlotState.STORED


class Standing(Enum):
    """What a broker may know of a request that failed."""

    UNNUMBERED = auto()
    """It went under no sequence, or did not get as far as one."""
    NUMBERED = auto()
    """It has a sequence, and nothing of it can be stored."""
    UNCERTAIN = auto()
    """It has a sequence, and may be stored or still be on its way."""


class Next(Enum):
    """What follows a request that failed."""

    RELEASE = auto()
    """Its sequence is given back; each of its sends has a next step of its own."""
    HOLD = auto()
    """It is sent again under its sequence, and later ones wait: that keeps their order."""
    MOVE_OR_HOLD = auto()
    """RELEASE of those of its sends that may go to another broker; HOLD of what is left."""
    REPEAT = auto()
    """It is sent again as it is: the broker stores what has this sequence once."""
    RENEW = auto()
    """The session is left; then RELEASE."""
    END = auto()
    """The session is left, and its sends fail: their outcome stays unknown."""


NEXT: Final[dict[Standing, dict[FailureKind, Next]]] = {
    Standing.UNNUMBERED: dict.fromkeys(FailureKind, Next.RELEASE),
    Standing.NUMBERED: {
        FailureKind.REDIRECTED: Next.HOLD,
        FailureKind.NOT_LEADER: Next.HOLD,
        FailureKind.REQUESTER_AWAY: Next.HOLD,
        FailureKind.UNREACHABLE: Next.MOVE_OR_HOLD,
        FailureKind.BUSY: Next.MOVE_OR_HOLD,
        FailureKind.REFUSED_HERE: Next.RELEASE,
        FailureKind.FINAL: Next.RELEASE,
        FailureKind.UNKNOWN: Next.REPEAT,
    },
    Standing.UNCERTAIN: dict.fromkeys(FailureKind, Next.REPEAT),
}
NEXT_IF_FORGOTTEN: Final = {
    Standing.UNNUMBERED: Next.RELEASE,
    Standing.NUMBERED: Next.RENEW,
    Standing.UNCERTAIN: Next.END,
}
"""When the broker does not know the request's session any more."""


def next_of(standing: Standing, failure: Failure, *, is_alone: bool) -> Next:
    """Return what follows *failure*.

    *is_alone*: the request holds one send that stands in no line: there is no order to keep.
    """
    follows = NEXT_IF_FORGOTTEN[standing] if failure.is_forgotten else NEXT[standing][failure.kind]
    if is_alone and follows in (Next.HOLD, Next.MOVE_OR_HOLD):
        return Next.RELEASE
    return follows


def error_of(slot: SendSlot, failure: Failure, broker_name: str) -> ClientError:
    """Return what the sender of *slot* gets after its last *failure*. Pure."""
    kind, code, remark = failure.kind, failure.code, failure.remark
    where = f"{slot.queue.topic} on {broker_name}"
    if slot.sent or kind is FailureKind.UNKNOWN:
        return UnknownOutcomeError(f"{where}: {remark}; the message may or may not be stored")
    if kind is FailureKind.UNREACHABLE or code < 0:
        if kind is FailureKind.FINAL:
            return MessageIllegalError(f"{where}: {remark}")
        return BrokerUnreachableError(f"{where}: {remark}; the message is not stored")
    if code == ResponseCode.MESSAGE_ILLEGAL:
        return MessageIllegalError(f"{where}: {remark}", remark=remark)
    text = f"{where}: refused with code {code}: {remark}"
    if kind is FailureKind.REQUESTER_AWAY:
        return RequesterAwayError(text, code=code, remark=remark)
    if kind in (FailureKind.BUSY, FailureKind.NOT_LEADER, FailureKind.REDIRECTED):
        return BrokerBusyError(text, code=code, remark=remark)
    return BrokerRefusedError(text, code=code, remark=remark)
