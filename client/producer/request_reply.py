"""Questions over messages: a request is a message like any other, its reply comes straight back.

::

    request ─► stored in its topic ─► a consumer, and its answer ─► reply_message ─► broker
       ▲                                                                                │
       └──────────────── 326, over the requester's own connection ◄─────────────────────┘

Spec: docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import trio
from typing_extensions import Buffer

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    ReplyTimedOutError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.retry import time_left_s
from dledger.commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MSG_TYPE,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    REPLY_MESSAGE_FLAG,
    reply_topic,
)

SEND_ENDS_WITHIN_S: Final = 1.0
"""How long after its deadline a request waits for what its send has to say of the message."""

_COPIED: Final = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL)
_OWN: Final = frozenset({*_COPIED, PROPERTY_MSG_TYPE})


class Send(Protocol):
    """Sends one message, as `Producer.send` does."""

    async def __call__(self, message: Message, *, timeout_s: float | None) -> SendResult:
        """Return when it is stored."""


def reply_message(
    request: MessageExt, body: Buffer, *, tags: str = "", keys: str | Sequence[str] = ""
) -> Message:
    """Return the reply to *request*, to be sent with any `Producer` of the same cluster.

    Its send returns when the requester has confirmed it. It raises `RequesterAwayError` when the
    requester is not connected to the brokers, and `UnknownOutcomeError` when it is not known
    whether it has the reply; a requester that gets a reply again passes over it.

    Args:
        request: As a consumer got it.
        body: At least one byte.
        tags: As for `Message`.
        keys: As for `Message`.
    Raises:
        MessageIllegalError: *request* is no request.
    """
    properties = request.properties
    cluster = properties.get(PROPERTY_CLUSTER)
    missing = [key for key in (PROPERTY_CLUSTER, *_COPIED[:2]) if key not in properties]
    if missing or cluster is None:
        raise MessageIllegalError(
            f"create reply message fail, requestMessage error, property{missing} is null."
        )
    copied: dict[str, str] = {key: properties[key] for key in _COPIED if key in properties}
    return Message(
        reply_topic(cluster),
        body,
        tags=tags,
        keys=keys,
        properties={PROPERTY_MSG_TYPE: REPLY_MESSAGE_FLAG, **copied},
    )


def is_reply(message: Message) -> bool:
    """Tell whether *message* goes to a requester instead of to consumers."""
    properties = message.properties
    return properties is not None and properties.get(PROPERTY_MSG_TYPE) == REPLY_MESSAGE_FLAG


async def request_reply(
    instance: ClientInstance, group: str, send: Send, message: Message, timeout_s: float
) -> MessageExt:
    """Send *message* and return its reply; raises what `Producer.request` does."""
    if message.properties and not _OWN.isdisjoint(message.properties):
        taken = sorted(_OWN.intersection(message.properties))
        raise MessageIllegalError(f"properties {taken} are set by the request itself")
    deadline = instance.clock.monotonic() + timeout_s
    with instance.requests.opened() as waiting:
        stamped = replace(
            message,
            properties={
                **(message.properties or {}),
                PROPERTY_CORRELATION_ID: waiting.correlation_id,
                PROPERTY_REPLY_TO_CLIENT: instance.client_id,
                PROPERTY_TTL: str(int(timeout_s * 1000)),
            },
        )
        await _be_known(instance, group, message.topic)
        sent = trio.Event()
        stored: SendResult | None = None
        failed: ClientError | None = None

        async def run() -> None:
            nonlocal stored, failed
            left_s = max(time_left_s(deadline, instance.clock.monotonic()), 0.001)
            try:
                stored = await send(stamped, timeout_s=left_s)
            except ClientError as error:
                failed = error
                if error.outcome == "not_stored":
                    waiting.ended.set()  # there is nothing to reply to
            sent.set()

        # The reply may come before the send ends.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            with trio.move_on_after(time_left_s(deadline, instance.clock.monotonic())):
                await waiting.ended.wait()
            if waiting.reply is None:
                with trio.move_on_after(SEND_ENDS_WITHIN_S):
                    await sent.wait()
            nursery.cancel_scope.cancel()
        if waiting.reply is not None:
            return waiting.reply
        raise _no_reply(stored, failed, timeout_s)


async def _be_known(instance: ClientInstance, group: str, topic: str) -> None:
    """Let the brokers that the reply may come from know this client before there is a request."""
    route = await instance.routes.publish(topic)
    names = dict.fromkeys(route.addresses)
    for cluster in route.clusters:
        try:
            replies = await instance.route(reply_topic(cluster))
        except (NoRouteError, NoNameServerError):
            continue  # the brokers of the request's own topic must do
        names.update(dict.fromkeys(replies.addresses))
    await instance.heartbeats.introduce(group, list(names))


def _no_reply(
    stored: SendResult | None, failed: ClientError | None, timeout_s: float
) -> ClientError:
    """Return what is known of a request to which no reply has come."""
    if stored is not None:
        return ReplyTimedOutError(
            f"the request {stored.message_id} is stored in {stored.message_queue}, but no "
            f"reply came within {timeout_s:g} s",
            send_result=stored,
        )
    if failed is not None and failed.outcome == "not_stored":
        return failed
    reason = "no answer came" if failed is None else str(failed)
    error = UnknownOutcomeError(
        f"{reason}; no reply came within {timeout_s:g} s, and the request may be stored"
    )
    error.__cause__ = failed
    return error
