"""Reads queues by offset; the caller decides where to read and what counts as consumed.

Spec: docs/internals/protocol/remoting.md, section 8.3.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from dledger.client.consumer.member_reads import FLAG_SUSPEND, MemberReads
from dledger.client.consumer.steps import ConsumeStep, StepSender
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import (
    DamagedAnswerError,
    LockLostError,
    NoRouteError,
    OffsetIllegalError,
    RequestFailedError,
    refusal,
)
from dledger.client.core.links import Link
from dledger.client.core.message_ext import MessageBlock, MessageExt, PullResult, PullStatus
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import CorruptRecordError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import (
    GetMaxOffsetHeader,
    Header,
    OffsetResponseHeader,
    PullMessageHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetHeader,
    QueueHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.own_fields import NO_OFFSET, TOKEN_FIELD, WITH_EXPIRED_FIELD

SUSPEND_S: Final = 20.0
"""How long a broker holds a pull that finds nothing; RocketMQ's pull consumer's."""
SUSPEND_MARGIN_S: Final = 10.0
"""How much longer than that the answer is waited for."""
ROCKETMQ_PULL_MESSAGES: Final = 32
"""More than this per pull only our brokers give; RocketMQ caps there."""
DRAIN_MESSAGES: Final = 4096
"""Asked for at a time when a backlog is read."""

_FLAG_SUBSCRIPTION: Final = 4


class PullConsumer(ManagedScope):
    """Reads on behalf of one consumer group. Open it with ``async with`` inside its instance."""

    def __init__(
        self, instance: ClientInstance, group: str, *, follower_reads: bool = False
    ) -> None:
        """Prepare a consumer; *instance* must be open when the consumer is opened.

        Args:
            follower_reads: Take messages from any member that has them: from the follower that
                the leader suggests to one far behind, and from any member while none leads.
                Only stored messages are ever read, and only the leader knows where a queue ends.
        """
        self.group = group
        self._instance = instance
        self._anywhere = MemberReads(instance) if follower_reads else None
        self._committed: dict[MessageQueue, int] = {}
        self._steps: StepSender | None = None

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        self._instance.nursery  # noqa: B018  # raises ClientClosedError when it is not open
        self._instance.heartbeats.add_consumer(self.group)
        try:
            yield
        finally:
            await self._instance.heartbeats.remove_consumer(self.group)

    async def fetch_message_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of *topic* that can be read, asking a NameServer now.

        Raises:
            NoRouteError: The NameServers do not know the topic, or no broker serves it.
            NoNameServerError: None answers and nothing is cached.
        """
        route = await self._instance.route(topic, fresh=True)
        if not route.subscribe_queues:
            raise NoRouteError(f"no broker has queues of {topic} that can be read")
        return route.subscribe_queues

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_messages: int = ROCKETMQ_PULL_MESSAGES,
        tags: str | SubscriptionExpression = "*",
        timeout_s: float = SUSPEND_S,
        max_bytes: int | None = None,
        lock_token: int | None = None,
        with_expired: bool = False,
    ) -> PullResult:
        """Read from *offset* on; wait up to *timeout_s* for something to come.

        Args:
            queue: One of `fetch_message_queues`.
            offset: First offset wanted.
            max_messages: At most this many. The broker has limits of its own.
            tags: ``*``, or tags joined by ``||``; `SubscriptionExpression.by_sql` for an SQL92
                expression over properties.
            timeout_s: How long the broker holds the request when there is nothing; 0: not at all.
            max_bytes: At most this many bytes, but at least one message.
            lock_token: Of the lock of *queue*; the broker answers only while that grant stands.
            with_expired: Also messages whose time to live is over: all that is stored.
        Returns:
            Messages as views over one buffer, and where to go on.
        Raises:
            OffsetIllegalError: *offset* is outside the queue; the error has its bounds.
            DamagedAnswerError: Bytes went bad on the broker's disk; pulling again may help.
            SubscriptionIllegalError: *tags* has a separator but no tag.
            RequestFailedError: The broker refused; see its code and remark: 23 when it cannot
                parse the expression.
            LockLostError: *lock_token* is old.
            BrokerUnreachableError: No broker answered in time.
        Cancellation: Nothing is lost: the offset is the caller's.
        """
        wanted = SubscriptionExpression.by_tag(tags) if isinstance(tags, str) else tags
        instance = self._instance
        await self._known(queue.topic)
        suspend_ms = max(0, int(timeout_s * 1000))
        header = PullMessageHeader(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_messages,
            sys_flag=_FLAG_SUBSCRIPTION | (FLAG_SUSPEND if suspend_ms else 0),
            commit_offset=0,
            suspend_timeout_millis=suspend_ms,
            sub_version=0,
            subscription=wanted.text,
            expression_type=wanted.kind,
            max_msg_bytes=max_bytes,
        )
        more = _shown(lock_token)
        if with_expired:
            more[WITH_EXPIRED_FIELD] = "true"
        used: list[Link] = []
        anywhere = self._anywhere
        if anywhere is not None:
            found = await anywhere.pull(
                queue, header, bulk=max_messages > ROCKETMQ_PULL_MESSAGES, more=more
            )
            if found is not None:
                return _admitted(queue, _pull_result(queue, offset, found), wanted)

        def code_for(link: Link) -> int:
            used[:] = [link]
            bulk = max_messages > ROCKETMQ_PULL_MESSAGES and link.bulk_pull
            return RequestCode.BULK_PULL if bulk else RequestCode.PULL_MESSAGE

        while True:
            answer = await instance.ask_leader(
                queue.broker_name,
                RequestCode.PULL_MESSAGE,
                {**header.encode(), **more},
                topic=queue.topic,
                timeout_s=timeout_s + SUSPEND_MARGIN_S,
                attempt_timeout_s=timeout_s + SUSPEND_MARGIN_S,
                adapt=code_for,
            )
            if (
                answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                and used
                and used[0].bulk_pull
            ):
                used[0].bulk_pull = False
                continue
            return _admitted(queue, _pull_result(queue, offset, answer), wanted)

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the first offset the queue holds.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        return await self._offset(
            queue, RequestCode.GET_MIN_OFFSET, QueueHeader(queue.topic, queue.queue_id)
        )

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the last offset of the queue.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        return await self._offset(
            queue, RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(queue.topic, queue.queue_id)
        )

    async def search_offset(
        self, queue: MessageQueue, timestamp_ms: int, *, upper: bool = False
    ) -> int:
        """Return the offset of the first message stored at or after *timestamp_ms*.

        Args:
            upper: Instead the last one stored at or before it, or the first one of the queue when
                all are later. Brokers of RocketMQ 4 know no such thing and pass over it.
        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        return await self._offset(
            queue,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            SearchOffsetHeader(
                queue.topic, queue.queue_id, timestamp_ms, "UPPER" if upper else None
            ),
        )

    async def commit_offset(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        timeout_s: float = 10.0,
        lock_token: int | None = None,
    ) -> None:
        """Store that everything below *offset* is dealt with; returns when it is stored.

        Args:
            lock_token: Of the lock of *queue*; stored only while that grant stands.
        Raises:
            LockLostError: *lock_token* is old; not stored.
            RequestFailedError: Refused; not stored.
            RequestTimedOutError: It may be stored or not; committing again is harmless.
        """
        # A step begins at an offset that was read, or stored by a step.
        self._committed.pop(queue, None)
        await self._ask(
            queue,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            UpdateConsumerOffsetHeader(self.group, queue.topic, queue.queue_id, offset),
            timeout_s=timeout_s,
            more=_shown(lock_token),
            changes=True,
        )

    async def committed_offset(self, queue: MessageQueue) -> int | None:
        """Return what the group has committed last, or None when it never did.

        From our brokers that is what is stored, and never an old answer.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        try:
            found = await self._offset(
                queue,
                RequestCode.QUERY_CONSUMER_OFFSET,
                QueryConsumerOffsetHeader(
                    self.group, queue.topic, queue.queue_id, set_zero_if_not_found=False
                ),
                more={"sync": "true"},  # ours: nothing stale
            )
        except RequestFailedError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                self._committed[queue] = NO_OFFSET
                return None
            raise
        self._committed[queue] = found
        return found

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float = 10.0) -> AsyncIterator[ConsumeStep]:
        """Store what the block sends and commits as one step, when it ends: all of it or nothing.

        The step begins at what this consumer last knew as committed, from `committed_offset` or
        the step before, and is stored only while the group stands there. A block that raises
        stores nothing. All queues are of one broker group.

        Raises:
            StepOvertakenError: Another consumer of the group was quicker; not stored.
            UnknownOutcomeError, RequestTimedOutError: It may be stored. Read `committed_offset`
                and go on from there: a step that was stored is not stored again.
            MessageIllegalError, RequestFailedError, BrokerUnreachableError, NoRouteError: Not
                stored.
        Cancellation: It may be stored.
        """
        step = ConsumeStep()
        yield step
        await self._store(step, timeout_s)

    async def _store(self, step: ConsumeStep, timeout_s: float) -> None:
        if self._steps is None:
            self._steps = StepSender(self._instance, self.group, self._committed)
        await self._steps.store(step, timeout_s)

    async def iter_messages(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        until: int | None = None,
        tags: str | SubscriptionExpression = "*",
        max_messages: int = DRAIN_MESSAGES,
    ) -> AsyncIterator[MessageExt]:
        """Yield the messages of a backlog in order, then end.

        Args:
            queue: Where from.
            offset: First offset wanted.
            until: End before this offset; None: the queue's end as it is met.
            tags: As for `pull`.
            max_messages: How many are asked for at a time.
        Raises:
            MQError: What `pull` raises.
        """
        while until is None or offset < until:
            result = await self.pull(
                queue, offset, max_messages=max_messages, tags=tags, timeout_s=0
            )
            for message in result.messages:
                if until is not None and message.queue_offset >= until:
                    return
                yield message
            if result.status is PullStatus.NO_NEW_MESSAGE:
                return
            if result.next_begin_offset <= offset and not result.messages:
                return
            offset = result.next_begin_offset

    async def drain(
        self, queues: Iterable[MessageQueue], *, tags: str | SubscriptionExpression = "*"
    ) -> AsyncIterator[tuple[MessageQueue, PullResult]]:
        """Yield whole pull results of each queue from its first offset to its present end.

        The cheapest way through a backlog: nothing is decoded that the caller does not read. It
        raises what `pull` raises.
        """
        for queue in queues:
            offset = await self.min_offset(queue)
            end = await self.max_offset(queue)
            while offset < end:
                result = await self.pull(
                    queue, offset, max_messages=DRAIN_MESSAGES, tags=tags, timeout_s=0
                )
                if result.messages:
                    yield queue, result
                if result.next_begin_offset <= offset:
                    break
                offset = result.next_begin_offset

    async def _known(self, topic: str) -> None:
        if self._instance.routes.table.get(topic) is None:
            await self._instance.route(topic)

    async def _ask(
        self,
        queue: MessageQueue,
        code: RequestCode,
        header: Header,
        *,
        timeout_s: float = 10.0,
        more: Mapping[str, str] | None = None,
        changes: bool = False,
    ) -> RemotingCommand:
        await self._known(queue.topic)
        answer = await self._instance.ask_leader(
            queue.broker_name,
            code,
            {**header.encode(), **(more or {})},
            topic=queue.topic,
            timeout_s=timeout_s,
            changes=changes,
        )
        if answer.code != ResponseCode.SUCCESS:
            kind = LockLostError if _is_lock_lost(answer) else RequestFailedError
            raise refusal(f"{queue}: {code.name}", answer, kind)
        return answer

    async def _offset(
        self,
        queue: MessageQueue,
        code: RequestCode,
        header: Header,
        *,
        more: Mapping[str, str] | None = None,
    ) -> int:
        return offset_in(await self._ask(queue, code, header, more=more), queue)


def offset_in(answer: RemotingCommand, queue: MessageQueue) -> int:
    """Return the offset of *queue* that a broker has answered.

    Raises RequestFailedError: there is none in *answer*.
    """
    try:
        return OffsetResponseHeader.decode(answer.ext).offset
    except BadRequestError as error:
        raise RequestFailedError(
            f"{queue}: the broker's answer has no offset: {error}", code=answer.code
        ) from error


def _admitted(
    queue: MessageQueue, result: PullResult, wanted: SubscriptionExpression
) -> PullResult:
    """Leave out messages whose tag has the hash of a wanted one and is another."""
    if not wanted.tags:
        return result
    try:
        kept = [message for message in result.messages if wanted.admits(message)]
    except CorruptRecordError as error:
        raise _damaged(queue, error) from error
    if len(kept) == len(result.messages):
        return result
    status = PullStatus.FOUND if kept else PullStatus.NO_MATCHED_MESSAGE
    return replace(result, status=status, messages=kept)


def _damaged(queue: MessageQueue, error: CorruptRecordError) -> DamagedAnswerError:
    # What a broker answers that finds the damage itself: pulling again reaches a repaired member.
    return DamagedAnswerError(
        f"{queue}: the messages are damaged on their broker, or on the way: {error}",
        code=ResponseCode.SERVICE_NOT_AVAILABLE,
    )


def _shown(lock_token: int | None) -> dict[str, str]:
    return {} if lock_token is None else {TOKEN_FIELD: str(lock_token)}


def _is_lock_lost(answer: RemotingCommand) -> bool:
    return answer.code == ResponseCode.STALE_LOCK_TOKEN


def _pull_result(queue: MessageQueue, offset: int, answer: RemotingCommand) -> PullResult:
    code = answer.code
    if code not in (
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    ):
        kind = LockLostError if _is_lock_lost(answer) else RequestFailedError
        raise kind(
            f"{queue}: pull refused with code {code}: {answer.remark or ''}",
            code=code,
            remark=answer.remark or "",
        )
    try:
        header = PullMessageResponseHeader.decode(answer.ext)
    except BadRequestError as error:
        raise RequestFailedError(
            f"{queue}: the broker's answer has no offsets: {error}", code=code
        ) from error
    if code == ResponseCode.PULL_OFFSET_MOVED:
        raise OffsetIllegalError(
            f"{queue}: offset {offset} is outside {header.min_offset} … {header.max_offset}",
            next_begin_offset=header.next_begin_offset,
            min_offset=header.min_offset,
            max_offset=header.max_offset,
        )
    if code == ResponseCode.SUCCESS:
        next_offset = header.next_begin_offset
        try:
            messages = MessageBlock(answer.body, queue.broker_name, offset, next_offset)
        except CorruptRecordError as error:
            raise _damaged(queue, error) from error
        return PullResult(
            PullStatus.FOUND, next_offset, header.min_offset, header.max_offset, messages
        )
    status = (
        PullStatus.NO_NEW_MESSAGE
        if code == ResponseCode.PULL_NOT_FOUND
        else PullStatus.NO_MATCHED_MESSAGE
    )
    return PullResult(status, header.next_begin_offset, header.min_offset, header.max_offset)
