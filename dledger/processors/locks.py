"""LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42); requests that show a lock's token.

Spec: docs/internals/protocol/remoting.md, sections 5.1 and 8.5; docs/reference/own-requests.md for
    the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.commitlog.errors import MQError
from dledger.processors.answers import Outcome, RefusedError, bad_request, check_group_name, refusal
from dledger.processors.handles import LOCKS, Limit, handles
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import (
    TOKENS_FIELD,
    decode_tokens,
    encode_tokens,
    shown_token,
)
from dledger.services.pending_configs import TopicView
from dledger.services.queue_locks import MAX_QUEUES_PER_CHANGE, OnLocked, QueueLocks
from dledger.state.queue_lock import LockKey


def check_lock_token(locks: QueueLocks, command: RemotingCommand, key: LockKey) -> bool:
    """Return whether *command* shows a token of *key* at all.

    Raises:
        RefusedError: It does, and the queue is not held with it any more.
        BadRequestError: It is no token.
    """
    token = shown_token(command.ext)
    if token is None:
        return False
    if locks.refuses(key, token):
        group, topic, queue_id = key
        raise RefusedError(
            Condition.STALE_LOCK_TOKEN,
            f"group {group} does not hold queue {queue_id} of {topic} with token {token} any more; "
            "lock it again",
        )
    return True


MAX_CLIENT_ID_CHARS: Final = 255
"""A holder's name is in every snapshot; RocketMQ's are about 30 characters."""


class QueueLocksProcessor:
    """Decodes lock requests, and answers them when their outcome is in the log."""

    def __init__(self, topics: TopicView, locks: QueueLocks) -> None:
        self._topics = topics
        self._locks = locks

    @handles(RequestCode.LOCK_BATCH_MQ, limit=Limit.CLIENT, rule=LOCKS)
    def lock(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 41: which of the queues the client holds now."""

        def begin(body: LockBatchRequestBody, on_done: OnLocked) -> None:
            self._locks.lock(body.client_id, _keys(body), on_done)

        def answer(body: LockBatchRequestBody, held: dict[LockKey, int]) -> RemotingCommand:
            queues = [
                (queue, held[key])
                for queue, key in zip(body.mq_set, _keys(body), strict=True)
                if key in held
            ]
            ext: dict[str, str] = {}
            if TOKENS_FIELD in command.ext:
                ext[TOKENS_FIELD] = encode_tokens(token for _, token in queues)
            response = LockBatchResponseBody([queue for queue, _ in queues])
            return response_to(command, ext=ext, body=response.encode())

        return self._handle(connection, command, begin, answer)

    @handles(RequestCode.UNLOCK_BATCH_MQ, limit=Limit.CLIENT, rule=LOCKS)
    def unlock(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 42 when the queues are given back; what others hold stays with them."""

        def begin(body: LockBatchRequestBody, on_done: OnLocked) -> None:
            tokens = decode_tokens(command.ext.get(TOKENS_FIELD, ""))
            if tokens and len(tokens) != len(body.mq_set):
                raise bad_request(f"{len(tokens)} tokens for {len(body.mq_set)} queues")
            self._locks.unlock(body.client_id, _keys(body), tokens, on_done)

        return self._handle(connection, command, begin, lambda *_: response_to(command))

    def _handle(
        self,
        connection: Connection,
        command: RemotingCommand,
        begin: Callable[[LockBatchRequestBody, OnLocked], None],
        answer: Callable[[LockBatchRequestBody, dict[LockKey, int]], RemotingCommand],
    ) -> Handled:
        outcome = Outcome(connection, command)

        def done(locked: dict[LockKey, int] | MQError) -> None:
            if isinstance(locked, MQError):
                outcome.answer(refusal(command, locked))
            else:
                outcome.answer(answer(body, locked))

        body = self._checked(command)
        begin(body, done)
        return outcome.handled()

    def _checked(self, command: RemotingCommand) -> LockBatchRequestBody:
        body = LockBatchRequestBody.decode(command.body)
        check_group_name(body.consumer_group)
        if self._topics.subscription_group_or_default(body.consumer_group) is None:
            raise RefusedError(
                Condition.GROUP_NOT_EXIST,
                f"subscription group [{body.consumer_group}] does not exist",
            )
        if not 0 < len(body.client_id) <= MAX_CLIENT_ID_CHARS:
            raise bad_request(
                f"a client id has 1 to {MAX_CLIENT_ID_CHARS} characters, not {len(body.client_id)}"
            )
        if len(body.mq_set) > MAX_QUEUES_PER_CHANGE:
            raise bad_request(
                f"{len(body.mq_set)} queues in one request; at most {MAX_QUEUES_PER_CHANGE}"
            )
        return body


def _keys(body: LockBatchRequestBody) -> list[LockKey]:
    return [(body.consumer_group, queue.topic, queue.queue_id) for queue in body.mq_set]
