"""Carries requests to the leader for clients that cannot find it, and brings its answers back.

A client of RocketMQ reads its route every 30 seconds and goes to the member that led then. A
request that this member refuses because it does not lead is sent on, as it is, once there is a
leader; the client waits for one answer and never learns of the change. Our own clients follow
leaders by themselves: they get the refusal, and so does another member, so a request is carried
once.

::

    refused ──► waits for a leader, a link, a session ──► under way ──► the leader's answer
                     ▲          │ LEADER_WITHIN_S              │
                     │          └─► the refusal                ├─ not stored: the member leads not
                     └─────────────────────────────────────────┤
                                                               └─ unknown, and may be repeated

A repetition must not store a message twice. So a send is stamped with a session of this member's
own, and the leader stores it once, in the order of the client; what cannot be stamped and is no
read is not repeated, and its client gets the outcome *unknown*. A signed request keeps its
signature, which the leader checks, and gets no stamp.

Spec: docs/concepts/fail-over.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.group_api import BrokerGroup
from dledger.processors.send import identities_of
from dledger.remoting.calls import Call
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import (
    FLAG_ONEWAY,
    OUR_LANGUAGE,
    RemotingCommand,
    SerializeType,
    request,
    response_to,
)
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.outcome import (
    GO_AWAY_FIELD,
    OUTCOME_FIELD,
    REASON_FIELD,
    RETRIABLE_FIELD,
    TERM_FIELD,
    Condition,
    answer,
)
from dledger.remoting.protocol.own_fields import (
    EPOCH_FIELD,
    ID_FIELD,
    OPEN_SEQUENCES_MAX,
    PRODUCER_ID_BYTES,
    ProducerStamp,
)
from dledger.remoting.protocol.signature import SIGNATURE
from dledger.remoting.seams import Clock, Rng
from dledger.waiting import Wakeup

FORWARDED_REQUESTS_MAX: Final = 4096
"""Requests that are carried at a time: above what 16 Java clients keep open. Then it is refused."""

FORWARDED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of their bodies together: they are held until they are answered. Then it is refused."""

LANES_MAX: Final = 64
"""Sessions of one member, shared by its clients: a leader keeps 4,096 for all producers of a group,
and a session may have 64 sends under way."""

LEADER_WITHIN_S: Final = 2.5
"""How long a request waits for a leader: clients of RocketMQ wait three seconds for an answer."""

LINK_WITHIN_S: Final = 0.5
"""How long connecting to a leader may take: those that wait must be answered in time."""

PAUSE_S: Final = 0.05
"""Before a leader that refused, or could not be reached, is tried again."""

FORMER_WITHIN_S: Final = 1.0
"""How long a member that leads no longer may answer what it got as a leader."""

_NEXT_TIME: Final = frozenset({Condition.SEQUENCE_GAP, Condition.SEQUENCE_UNDECIDED})
"""Reasons for which a stamped send comes again: one before it has to come first, or it is on its
way itself."""

LOOK_S: Final = 0.5
"""How often this member checks whether it stood still itself."""

STALE_S: Final = 1.0
"""How long it refuses then: what waited in its sockets its clients have given up and sent again."""

STAMPED: Final = frozenset(
    {RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE}
)

_LANE: Final = "lane of forwarded sends"
"""Attribute of a connection."""


@dataclass(slots=True, eq=False)
class _Lane:
    """The session of some clients at the leader; their sends are stored in the order they came.

    Attributes:
        producer_id: Empty: the session has yet to be opened.
        epoch: 0 while it is being opened.
        open: Sends with a sequence that are not answered yet, in its order.
    """

    producer_id: bytes = b""
    epoch: int = 0
    next_sequence: int = 0
    open: dict[int, _Carried] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Carried:
    """A request that is carried.

    Attributes:
        number: Of its arrival.
        refusal: What the client gets where no leader is found in time.
        copy: What goes to the leader.
        lane: Of a send that gets a stamp.
        sequence: Its number in the session of its lane; negative: it has none yet.
        is_uncertain: The leader may have carried it out: without an answer its outcome is unknown.
    """

    number: int
    connection: Connection
    asked: RemotingCommand
    refusal: RemotingCommand
    copy: RemotingCommand
    size_bytes: int
    deadline_s: float
    is_repeatable: bool
    lane: _Lane | None
    sequence: int = -1
    is_uncertain: bool = False


@dataclass(eq=False, repr=False)
class Forwarder:
    """What one member carries to its leader.

    *repeatable*: Codes of requests that change nothing when they are repeated. *stamps*: Sends may
    get a stamp: there is no access control, whose signatures cover every field.
    """

    _group: BrokerGroup
    _client: RemotingClient
    _clock: Clock
    _rng: Rng
    _repeatable: Collection[int]
    stamps: bool
    size_bytes: int = 0
    _open: dict[int, _Carried] = field(default_factory=dict)
    _waiting: dict[_Carried, None] = field(default_factory=dict)
    _lanes: list[_Lane] = field(default_factory=lambda: [_Lane() for _ in range(LANES_MAX)])
    _leader: str | None = None
    _former_until_s: dict[str, float] = field(default_factory=dict)
    _pause_until_s: float = 0.0
    _ran_s: float = math.inf
    _stale_until_s: float = 0.0
    _moved: Wakeup = field(default_factory=Wakeup)

    def __post_init__(self) -> None:
        self._counts = self._group.service_counts.forwarded

    def __len__(self) -> int:
        return len(self._open)

    def take(
        self, connection: Connection, asked: RemotingCommand, refusal: RemotingCommand
    ) -> bool:
        """Return whether a request with this refusal is carried, and answered later."""
        follows = asked.language == OUR_LANGUAGE or asked.serialize is SerializeType.CBOR
        if follows or id(asked) in self._open or not _leads_not(refusal):
            return False
        size, now = memoryview(asked.body).nbytes, self._now()
        if (
            now < self._stale_until_s
            or len(self._open) >= FORWARDED_REQUESTS_MAX
            or self.size_bytes + size > FORWARDED_BYTES_MAX
        ):
            self._counts["refused"] += 1
            return False
        number = self._counts["taken"]
        lane = connection.attributes.setdefault(_LANE, self._lanes[number % LANES_MAX])
        is_stamped = self.stamps and asked.code in STAMPED and _can_be_stamped(asked)
        self._open[id(asked)] = carried = _Carried(
            number,
            connection,
            asked,
            refusal,
            _copy_of(asked),
            size,
            now + LEADER_WITHIN_S,
            is_stamped or asked.code in self._repeatable,
            lane if is_stamped else None,
        )
        self.size_bytes += size
        self._counts["taken"] += 1
        self._waiting[carried] = None
        self._moved.set()
        return True

    def _now(self) -> float:
        """Return the time, and note whether this member has stood still."""
        now = self._clock.monotonic()
        if now - self._ran_s > LEADER_WITHIN_S:
            self._stale_until_s = now + STALE_S
        self._ran_s = now
        return now

    def role_changed(self) -> None:
        """Go to a new leader; to be put into the group's `on_role_change`."""
        self._pause_until_s = 0.0
        self._moved.set()

    async def run(self) -> None:
        """Carry what waits, without end.

        Cancellation: What is carried is left to the end of its connections.
        """
        while True:
            await self._moved.wait_or(self._clock, self._next_look_s())
            now = self._now()
            self._note_leader(now)
            while self._waiting and (carried := next(iter(self._waiting))).deadline_s <= now:
                self._give_up(carried)
            leader = self._group.leader_address
            if self._waiting and leader is not None and now >= self._pause_until_s:
                await self._send_to(leader)

    def _next_look_s(self) -> float:
        """Return for how long nothing is to be done."""
        now = self._clock.monotonic()
        times = [now + LOOK_S, *self._former_until_s.values()]
        if self._waiting:
            times.append(next(iter(self._waiting)).deadline_s)  # it waits longest
            if self._pause_until_s > now:
                times.append(self._pause_until_s)
        return max(0.0, min(times) - now)

    def _pause(self) -> None:
        self._pause_until_s = self._clock.monotonic() + PAUSE_S
        self._moved.set()

    def _note_leader(self, now: float) -> None:
        """End the calls to a member that has led, a while after another one leads."""
        leader = self._group.leader_address
        if leader is not None and leader != self._leader:
            if self._leader is not None:
                self._former_until_s[self._leader] = now + FORMER_WITHIN_S
            self._former_until_s.pop(leader, None)
            self._leader = leader
        for address, until_s in list(self._former_until_s.items()):
            if until_s <= now:
                del self._former_until_s[address]
                self._client.disconnect(address, "it leads no longer")

    # ------------------------------------------------------------------------------ sending

    async def _send_to(self, leader: str) -> None:
        try:
            link = self._client.live(leader)
            self._send_over(link or await self._client.connection(leader, LINK_WITHIN_S))
        except (RemotingError, LocalProtocolError):  # no link, or a limit of it
            self._pause()

    def _send_over(self, link: Connection) -> None:
        for carried in sorted(self._waiting, key=attrgetter("number")):
            if carried.lane is not None and not self._stamp(carried, carried.lane, link):
                continue
            try:
                if carried.asked.flag & FLAG_ONEWAY:
                    link.invoke_oneway(carried.copy)
                    self._finish(carried, carried.refusal)  # it is not sent
                else:
                    link.start(carried.copy, partial(self._ended, carried))
            except LocalProtocolError as error:
                self._finish(carried, answer(carried.asked, Condition.BAD_REQUEST, str(error)))
            else:
                self._waiting.pop(carried, None)

    def _stamp(self, carried: _Carried, lane: _Lane, link: Connection) -> bool:
        """Stamp a send for its lane; return whether it may go to the leader now."""
        if not lane.epoch:
            if not lane.producer_id:
                self._open_session(lane, link)
            return False
        if carried.sequence < 0:
            if lane.next_sequence - next(iter(lane.open), lane.next_sequence) >= OPEN_SEQUENCES_MAX:
                return False
            carried.sequence = lane.next_sequence
            lane.next_sequence += 1
            lane.open[carried.sequence] = carried
        first_open = next(iter(lane.open))
        stamp = ProducerStamp(lane.producer_id, lane.epoch, carried.sequence, first_open)
        carried.copy.ext.update(stamp.as_texts())
        return True

    def _open_session(self, lane: _Lane, link: Connection) -> None:
        producer_id = self._rng.randbytes(PRODUCER_ID_BYTES)
        fields = {ID_FIELD: producer_id.hex(), EPOCH_FIELD: "0"}
        asked = request(RequestCode.OPEN_PRODUCER, fields, serialize=SerializeType.CBOR)
        link.start(asked, partial(self._opened, lane))
        lane.producer_id = producer_id

    def _opened(self, lane: _Lane, call: Call) -> None:
        if call.response is None or call.response.code != ResponseCode.SUCCESS:
            lane.producer_id = b""
            self._pause()
        else:
            lane.epoch, lane.next_sequence = int(call.response.ext[EPOCH_FIELD]), 0
            self._moved.set()

    # ------------------------------------------------------------------------------ answers

    def _ended(self, carried: _Carried, call: Call) -> None:
        response, lane = call.response, carried.lane
        if response is None:
            return self._note_loss(carried, was_handed=call.was_handed)
        ext, reason = response.ext, response.ext.get(REASON_FIELD)
        is_open = ext.get(OUTCOME_FIELD) == "unknown" and ext.get(RETRIABLE_FIELD) == "true"
        if _leads_not(response) or GO_AWAY_FIELD in ext:
            carried.refusal = response
        elif reason == Condition.PRODUCER_UNKNOWN and lane and not carried.is_uncertain:
            self._leave_session(carried, lane)
        elif carried.is_repeatable and is_open:
            carried.is_uncertain = True
        elif reason not in _NEXT_TIME:
            code, remark = response.code, response.remark
            return self._finish(
                carried, response_to(carried.asked, code, remark, ext, response.body)
            )
        return self._wait_again(carried)

    def _leave_session(self, carried: _Carried, lane: _Lane) -> None:
        """Let a send wait for another session: the leader does not know the one it came under."""
        if carried.copy.ext[ID_FIELD] == lane.producer_id.hex():
            lane.producer_id, lane.epoch = b"", 0
            sends, lane.open = lane.open, {}
            for one in sends.values():
                one.sequence = -1
                if one.is_uncertain and one in self._waiting:
                    self._give_up(one)
        carried.sequence = -1

    def _note_loss(self, carried: _Carried, *, was_handed: bool) -> None:
        if was_handed:
            carried.is_uncertain = True
            if not carried.is_repeatable:
                self._give_up(carried)
                return
        self._wait_again(carried)

    def _wait_again(self, carried: _Carried) -> None:
        if carried.is_uncertain and carried.lane and carried.sequence < 0:
            return self._give_up(carried)  # another session would store it a second time
        carried.deadline_s = self._clock.monotonic() + LEADER_WITHIN_S
        self._counts["repeated"] += 1
        self._waiting[carried] = None
        return self._pause()

    def _give_up(self, carried: _Carried) -> None:
        """Answer with what is known: refused, or, where a leader may have got it, unknown."""
        response = carried.refusal
        if carried.is_uncertain:
            response = answer(
                carried.asked,
                Condition.LEADERSHIP_LOST,
                "the leader ended before it answered; the message may or may not be stored",
            )
        self._finish(carried, response)

    def _finish(self, carried: _Carried, response: RemotingCommand) -> None:
        self._waiting.pop(carried, None)
        lane = carried.lane
        if lane is not None and lane.open.get(carried.sequence) is carried:
            del lane.open[carried.sequence]
            self._moved.set()
        # While it is open here its answer is not taken for another refusal to carry.
        carried.connection.reply(carried.asked, response)
        del self._open[id(carried.asked)]
        self.size_bytes -= carried.size_bytes


def _leads_not(response: RemotingCommand) -> bool:
    """Return whether *response* states that its sender does not lead, and has done nothing."""
    return response.code == ResponseCode.SERVICE_NOT_AVAILABLE and TERM_FIELD in response.ext


def _can_be_stamped(asked: RemotingCommand) -> bool:
    if SIGNATURE in asked.ext or ID_FIELD in asked.ext:
        return False
    try:
        identities_of(SendMessageHeader.of(asked), asked)
    except MQError:
        return False
    return True


def _copy_of(asked: RemotingCommand) -> RemotingCommand:
    """Return the request as it goes to the leader: in the encoding of those that follow."""
    copy = request(asked.code, dict(asked.ext), asked.body, serialize=SerializeType.CBOR)
    copy.language, copy.version = asked.language, asked.version
    return copy
