"""Locks of queues: one client of a group has a queue to itself, and a fencing token to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from client.core.client_instance import ClientInstance
from client.core.errors import RequestFailedError, RequestTimedOutError
from client.core.route import MessageQueue
from remoting.errors import BadRequestError
from remoting.protocol import bodies
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.lock_tokens import TOKENS_FIELD, WANTED, decode_tokens, encode_tokens
from remoting.protocol.outcome import outcome_of

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
        client_id: Who holds; None: the instance. Two that lock for themselves need two names.
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
            The queues granted, with their tokens. Others are held by somebody else.
        Raises:
            RequestFailedError: Refused; nothing was granted.
            BrokerUnreachableError: Nobody could be asked.
            RequestTimedOutError: Queues may have been locked; asking again tells.
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
            BrokerUnreachableError: Nobody could be asked.
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
            mq_set=[
                bodies.MessageQueue(queue.topic, queue.broker_name, queue.queue_id)
                for queue in queues
            ],
        )
        answer = await self._instance.ask_leader(
            broker_name,
            code,
            dict(ext),
            body.encode(),
            topic=queues[0].topic,
            timeout_s=timeout_s,
        )
        if answer.code == ResponseCode.SUCCESS:
            return answer
        remark = answer.remark or ""
        if outcome_of(answer) == "unknown":
            raise RequestTimedOutError(
                f"{code.name} at {broker_name} may or may not be done: {remark}",
                code=answer.code,
                remark=remark,
            )
        raise RequestFailedError(
            f"{code.name} refused by {broker_name} with code {answer.code}: {remark}",
            code=answer.code,
            remark=remark,
        )


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return found


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
            f"an answer about locks that makes no sense: {error}", code=answer.code
        ) from error
    return {
        MessageQueue(queue.topic, queue.broker_name, queue.queue_id): token
        for queue, token in zip(granted, tokens, strict=True)
    }
