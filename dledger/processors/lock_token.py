"""Requests that show the token of a queue lock are served only while that grant stands."""

from __future__ import annotations

from dledger.processors.refusal import RefusedError
from dledger.services.queue_locks import QueueLocks
from dledger.state.queue_lock import LockKey
from remoting.protocol.command import RemotingCommand
from remoting.protocol.lock_tokens import shown_token
from remoting.protocol.outcome import Condition


def check_lock_token(locks: QueueLocks, command: RemotingCommand, key: LockKey) -> bool:
    """Tell whether *command* shows a token of *key* at all.

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
