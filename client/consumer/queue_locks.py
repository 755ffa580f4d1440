"""Locks of queues: one client of a group has a queue to itself, and a fencing token to show.

A lock is the broker's; an ordered consumer counts it as held for 30 seconds after it asked, which
is less than the broker keeps it for a silent consumer, and asks again every 20 seconds.

Spec: docs/internals/protocol/semantics.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import trio

from dledger.client.core.broker_requests import sdk_queue, wire_queue
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import RequestFailedError, refusal
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.own_fields import TOKENS_FIELD, WANTED, decode_tokens, encode_tokens

_log = get_logger(__name__)

LOCK_TIMEOUT_S: Final = 10.0
"""Budget of one call, a fail-over included."""

Held = dict[MessageQueue, int | None]
"""Queues held, with the token of each; None from a real RocketMQ, which has no tokens."""


class LockClient:
    """Locks and unlocks queues for one consumer group of an instance.

    A lock is a lease: it ends 60 s (the broker's ``lock_lease_ms``) after the call that granted or
    renewed it. Renew it by locking again, and count from *before* the call. Whatever is done under
    a lock shows its token: `PullConsumer.pull` and `PullConsumer.commit_offset` take it, and so
    should an external store.

    Args:
        instance: Must be open.
        group: Consumer group.
        client_id: The holder; None: the instance. Two that lock for themselves need two names.
    """

    def __init__(
        self, instance: ClientInstance, group: str, *, client_id: str | None = None
    ) -> None:
        self.group = group
        self.client_id = instance.client_id if client_id is None else client_id
        self._instance = instance

    async def lock(
        self, queues: Iterable[MessageQueue], *, timeout_s: float = LOCK_TIMEOUT_S
    ) -> Held:
        """Lock *queues*, or renew those this client holds; returns what it holds now.

        Queues of several broker groups are asked for one group after the other.

        Returns:
            The queues granted, with their tokens. Others are held by another client.
        Raises:
            RequestFailedError: Refused; nothing was granted.
            BrokerUnreachableError: No broker answered.
            RequestTimedOutError: Queues may have been locked; asking again shows it.
        Cancellation: Queues may have been locked; they are free again when the lease is over.
        """
        held: Held = {}
        for broker_name, wanted in _by_broker(queues).items():
            answer = await self._ask(
                broker_name, RequestCode.LOCK_BATCH_MQ, wanted, {TOKENS_FIELD: WANTED}, timeout_s
            )
            held.update(_held(answer))
        return held

    async def unlock(
        self, held: Mapping[MessageQueue, int | None], *, timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        """Give queues back; what is held with another token by now is left alone.

        Raises:
            RequestFailedError: Refused; nothing was given back.
            BrokerUnreachableError: No broker answered.
            RequestTimedOutError: They may have been given back.
        Cancellation: They may have been given back.
        """
        for broker_name, queues in _by_broker(held).items():
            tokens = [held[queue] for queue in queues]
            ext = {}
            if None not in tokens:
                ext[TOKENS_FIELD] = encode_tokens(token for token in tokens if token is not None)
            await self._ask(broker_name, RequestCode.UNLOCK_BATCH_MQ, queues, ext, timeout_s)

    async def _ask(
        self,
        broker_name: str,
        code: RequestCode,
        queues: list[MessageQueue],
        ext: dict[str, str],
        timeout_s: float,
    ) -> RemotingCommand:
        body = bodies.LockBatchRequestBody(
            consumer_group=self.group,
            client_id=self.client_id,
            mq_set=list(map(wire_queue, queues)),
        )
        answer = await self._instance.ask_leader(
            broker_name, code, dict(ext), body.encode(), topic=queues[0].topic, timeout_s=timeout_s
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(f"{code.name} at {broker_name}", answer)
        return answer


def _held(answer: RemotingCommand) -> Held:
    try:
        granted = bodies.LockBatchResponseBody.decode(answer.body).lock_ok_mq_set
        tokens: tuple[int | None, ...] = (None,) * len(granted)
        if TOKENS_FIELD in answer.ext:
            tokens = decode_tokens(answer.ext[TOKENS_FIELD])
        if len(tokens) != len(granted):
            raise BadRequestError(f"{len(tokens)} tokens for {len(granted)} queues")
    except BadRequestError as error:
        raise RequestFailedError(
            f"the broker's answer about locks cannot be read: {error}", code=answer.code
        ) from error
    return dict(zip(map(sdk_queue, granted), tokens, strict=True))


RENEW_S: Final = 20.0
"""RocketMQ's rebalance lock interval."""
EXPIRES_S: Final = 30.0
"""RocketMQ's: a lock that was not renewed for so long counts as lost."""
AGAIN_S: Final = 1.0
"""Between two questions for a lock that another client has."""
ROUND_TIMEOUT_S: Final = 5.0
"""For one question; the next round asks again."""
UNLOCK_TIMEOUT_S: Final = 2.0
"""Without it the broker lets the lock expire."""


class QueueLocks:
    """The locks of one consumer."""

    def __init__(
        self, instance: ClientInstance, group: str, wanted: Callable[[], Iterable[MessageQueue]]
    ) -> None:
        """Prepare."""
        self._instance = instance
        self._client = LockClient(instance, group)
        self._wanted = wanted
        self._held_until: dict[MessageQueue, float] = {}
        self._asked = trio.Event()
        self._changed = trio.Event()
        # A queue that was lost in between may have been consumed by another client: a new number.
        self._grants: dict[MessageQueue, int] = {}
        self._grant_count = 0
        # One question to a broker at a time: a lock must not overtake its own unlock.
        self._asking: dict[str, trio.Lock] = {}
        self.tokens: dict[MessageQueue, int] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """Tell whether *queue* is this consumer's to consume at this moment."""
        return self._instance.clock.monotonic() < self._held_until.get(queue, 0.0)

    def grant(self, queue: MessageQueue) -> int | None:
        """Return the number under which *queue* is held without a break, or None."""
        return self._grants[queue] if self.is_held(queue) else None

    def left_s(self, queue: MessageQueue) -> float:
        """Return for how long the lock is held if it is not renewed; 0 when it is not."""
        return max(0.0, self._held_until.get(queue, 0.0) - self._instance.clock.monotonic())

    def lock_now(self) -> None:
        """Ask now for what is wanted and not held."""
        self._asked.set()

    async def held(self, queue: MessageQueue) -> int:
        """Wait until *queue* is held and return the number of that grant, see `grant`."""
        while (grant := self.grant(queue)) is None:
            await self._changed.wait()
        return grant

    async def ended(self, queue: MessageQueue, grant: int) -> None:
        """Wait until *queue* is not held under the number *grant* any more."""
        while self.grant(queue) == grant:
            with trio.move_on_after(self.left_s(queue)):
                await self._changed.wait()

    async def run(self) -> None:
        """Ask for locks and renew them until cancelled.

        Cancellation: The locks stay held; `unlock` gives them back.
        """
        clock = self._instance.clock
        renew_at = clock.monotonic() + RENEW_S
        while True:
            self._asked = trio.Event()
            wanted = list(self._wanted())
            is_renewal = clock.monotonic() >= renew_at
            queues = wanted if is_renewal else [q for q in wanted if not self.is_held(q)]
            is_answered = await self._lock(queues)
            if is_renewal and is_answered:
                renew_at = clock.monotonic() + RENEW_S
            is_complete = is_answered and all(map(self.is_held, self._wanted()))
            left_s = max(0.0, renew_at - clock.monotonic())
            with trio.move_on_after(left_s if is_complete else AGAIN_S):
                await self._asked.wait()

    async def _lock(self, queues: list[MessageQueue]) -> bool:
        """Ask for the locks of *queues*; return whether every broker has answered."""
        answered: list[str] = []
        by_broker = _by_broker(queues)
        async with trio.open_nursery() as nursery:
            for broker_name in sorted(by_broker):
                nursery.start_soon(self._lock_on, broker_name, by_broker[broker_name], answered)
        return len(answered) == len(by_broker)

    async def _lock_on(
        self, broker_name: str, queues: list[MessageQueue], answered: list[str]
    ) -> None:
        async with self._asking.setdefault(broker_name, trio.Lock()):
            # One that was given up meanwhile must not be locked again.
            wanted = set(self._wanted())
            queues = [queue for queue in queues if queue in wanted]
            if not queues or await self._lock_at(broker_name, queues):
                answered.append(broker_name)

    async def _lock_at(self, broker_name: str, queues: list[MessageQueue]) -> bool:
        # The broker counts from when it receives the request, which is later.
        asked_at = self._instance.clock.monotonic()
        try:
            granted = await self._client.lock(queues, timeout_s=ROUND_TIMEOUT_S)
        except MQError as error:
            # What is held is held until it expires.
            _log.warning("queues_not_locked", broker=broker_name, error=str(error))
            return False
        for queue in queues:
            if queue in granted:
                token = granted[queue]
                # Another token is another grant, even if the one before has not expired here.
                is_same = token is None or self.tokens.get(queue, token) == token
                if not (is_same and self.is_held(queue)):
                    self._grant_count += 1
                    self._grants[queue] = self._grant_count
                self._held_until[queue] = asked_at + EXPIRES_S
                if token is not None:
                    self.tokens[queue] = token
            elif self._held_until.pop(queue, None) is not None:
                self.tokens.pop(queue, None)
                _log.warning("queue_lock_lost", queue=str(queue))
        self._wake()
        return True

    def _wake(self) -> None:
        """Let all look that wait for a grant, or for the end of one."""
        event, self._changed = self._changed, trio.Event()
        event.set()

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Give locks back, so that others need not wait for them to expire."""
        by_broker = _by_broker(queues)
        async with trio.open_nursery() as nursery:
            for broker_name in sorted(by_broker):
                nursery.start_soon(self._unlock_on, broker_name, by_broker[broker_name])

    async def _unlock_on(self, broker_name: str, queues: list[MessageQueue]) -> None:
        async with self._asking.setdefault(broker_name, trio.Lock()):
            # Also those that are not held: the answer that would have shown it may be lost.
            held = {queue: self.tokens.pop(queue, None) for queue in queues}
            for queue in queues:
                self._held_until.pop(queue, None)
            try:
                await self._client.unlock(held, timeout_s=UNLOCK_TIMEOUT_S)
            except MQError as error:
                _log.info("queues_not_unlocked", broker=broker_name, error=str(error))

    def lost(self, queue: MessageQueue) -> None:
        """A broker reports that the grant of *queue* has ended: ask for it again."""
        if self._held_until.pop(queue, None) is not None:
            _log.warning("queue_lock_lost", queue=str(queue))
        self.tokens.pop(queue, None)
        self._wake()
        self.lock_now()


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    groups: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        groups.setdefault(queue.broker_name, []).append(queue)
    return groups
