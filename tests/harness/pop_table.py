"""What a fake broker has handed out by POP, and how receipts are answered."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.own_fields import STALE_FIELD, UNSEEN_FIELD, encode_stale
from dledger.remoting.protocol.pop_requests import (
    AckMessageHeader,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    ReceiptHandle,
    encode_offsets,
    revive_queue_of,
)

Key = tuple[int, int]
"""Queue and offset of a message."""


@dataclass(slots=True)
class Out:
    """A message that is out: how often, under which token, until when, for which receive."""

    attempts: int
    token: int
    popped_ms: int
    ends_s: float
    attempt_id: str


@dataclass(eq=False, kw_only=True)
class PopTable:
    """The messages of one topic, for one consumer group.

    Attributes:
        retries: A message is handed out once more than that, and is a dead letter then.
        dead: Dead letters that a broker has made because they were out too often.
        settled: Messages that were acknowledged.
        names_stale: It names the stale receipts of a batch.
    """

    retries: int = 16
    names_stale: bool = True
    out: dict[Key, Out] = field(default_factory=dict)
    settled: set[Key] = field(default_factory=set)
    dead: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._token = 0
        self._next: Counter[int] = Counter()
        self._moved = trio.Event()

    def move(self) -> None:
        """Let receives look again."""
        self._moved.set()
        self._moved = trio.Event()

    async def moved(self, until_s: float) -> None:
        """Wait until there may be something to take, until then at most."""
        with trio.move_on_at(min([until_s, *(out.ends_s for out in self.out.values())])):
            await self._moved.wait()

    def take(self, header: PopMessageHeader, counts: Mapping[int, int]) -> list[Key]:
        """Hand messages out: those whose time is over, then new ones.

        Args:
            counts: How many messages each queue has.
        """
        now_s = trio.current_time()
        found = [key for key, out in sorted(self.out.items()) if out.ends_s <= now_s]
        for key in [each for each in found if self.out[each].attempts > self.retries]:
            found.remove(key)
            del self.out[key]
            self.dead.add(key)
        for queue_id, count in counts.items():
            while len(found) < header.max_msg_nums and self._next[queue_id] < count:
                found.append((queue_id, self._next[queue_id]))
                self._next[queue_id] += 1
        found = sorted(found[: header.max_msg_nums])
        self._token += 1
        for key in found:
            attempts = self.out[key].attempts if key in self.out else 0
            self._put(key, attempts + 1, header.invisible_time, header.attempt_id or "")
        return found

    def _put(self, key: Key, attempts: int, invisible_ms: int, attempt_id: str) -> None:
        now_s = trio.current_time()
        ends_s = now_s + invisible_ms / 1000
        self.out[key] = Out(attempts, self._token, round(now_s * 1000), ends_s, attempt_id)

    def granted(
        self, asked: RemotingCommand, found: Sequence[Key], record: Callable[[Key], bytes]
    ) -> RemotingCommand:
        """Return the answer that hands *found* out."""
        by_queue: dict[int, list[int]] = {}
        for queue_id, offset in found:
            by_queue.setdefault(queue_id, []).append(offset)
        starts, texts = encode_offsets(by_queue)
        out = self.out[found[0]]
        invisible_ms = PopMessageHeader.decode(asked.ext).invisible_time
        fields = PopMessageResponseHeader(
            out.popped_ms, invisible_ms, revive_queue_of(out.token), 0, starts, texts
        )
        return response_to(asked, 0, None, fields.encode(), b"".join(map(record, found)))

    # ------------------------------------------------------------------------------ receipts

    def marked(self, asked: RemotingCommand) -> RemotingCommand:
        """Do what a request with receipts asks for, and return the answer."""
        if asked.code == RequestCode.BATCH_ACK_MESSAGE:
            return self._ack_batch(asked)
        if asked.code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
            return self._change(asked)
        if self._ack(*_shown(AckMessageHeader.decode(asked.ext).extra_info)):
            return response_to(asked)
        return answer(asked, Condition.STALE_RECEIPT)

    def _settle(self, key: Key, popped_ms: int, revive: int) -> Out | None:
        out = self.out.get(key)
        if out is None or (out.popped_ms, revive_queue_of(out.token)) != (popped_ms, revive):
            return None
        return self.out.pop(key)

    def _ack(self, key: Key, popped_ms: int, revive: int) -> bool:
        is_out = self._settle(key, popped_ms, revive) is not None
        if is_out:
            self.settled.add(key)
        return is_out

    def _ack_batch(self, asked: RemotingCommand) -> RemotingCommand:
        items = BatchAckMessageRequestBody.decode(asked.body).acks
        accepted = [
            self._ack((item.q, offset), item.pt, item.rq)
            for item in items
            for offset in item.offsets
        ]
        if all(accepted):
            return response_to(asked)
        if not self.names_stale:
            return response_to(asked, ResponseCode.NO_MESSAGE, "some are stale")
        refusal = answer(asked, Condition.STALE_RECEIPT)
        refusal.ext[STALE_FIELD] = encode_stale(accepted)
        return refusal

    def _change(self, asked: RemotingCommand) -> RemotingCommand:
        header = ChangeInvisibleTimeHeader.decode(asked.ext)
        key, *shown = _shown(header.extra_info)
        out = self._settle(key, *shown)
        if out is None:
            return answer(asked, Condition.STALE_RECEIPT)
        self._token += 1
        attempts = out.attempts - (UNSEEN_FIELD in asked.ext)
        self._put(key, attempts, header.invisible_time, out.attempt_id)
        self.move()
        new = ChangeInvisibleTimeResponseHeader(
            self.out[key].popped_ms, header.invisible_time, revive_queue_of(self._token)
        )
        return response_to(asked, 0, None, dict(new.encode()))


def _shown(text: str) -> tuple[Key, int, int]:
    receipt = ReceiptHandle.decode(text)
    return (receipt.queue_id, receipt.offset), receipt.pop_time_ms, receipt.revive_queue_id
