"""Takes back a message that waits for its time.

Spec: docs/internals/protocol/remoting.md, section 7.2.
"""

from __future__ import annotations

from typing import Final

from client.core.client_instance import ClientInstance
from client.core.errors import (
    AlreadyDeliveredError,
    BrokerBusyError,
    BrokerRefusedError,
    MessageIllegalError,
    RequestFailedError,
    RequestTimedOutError,
    UnknownOutcomeError,
)
from remoting.errors import BadRequestError
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.headers import RecallMessageHeader
from remoting.protocol.outcome import outcome_of
from remoting.protocol.recall_handle import RecallHandle

ASK_AGAIN_S: Final = 0.1
"""Pause before a broker that does not know what became of a recall is asked again."""


async def recall(
    instance: ClientInstance, producer_group: str, handle: str, timeout_s: float
) -> str:
    """Recall the message of *handle*; `Producer.recall` says what is returned and raised."""
    try:
        named = RecallHandle.decode(handle)
    except BadRequestError as error:
        raise MessageIllegalError(str(error)) from error
    ext = dict(RecallMessageHeader(named.topic, handle, producer_group).encode())
    deadline = instance.clock.monotonic() + timeout_s
    what = f"recall of {named.uniq_key} on {named.broker_name}"
    await instance.route(named.topic)  # makes its brokers known
    while True:
        try:
            answer = await instance.ask_leader(
                named.broker_name,
                RequestCode.RECALL_MESSAGE,
                ext,
                topic=named.topic,
                timeout_s=max(deadline - instance.clock.monotonic(), 0.001),
            )
        except RequestTimedOutError as error:
            raise UnknownOutcomeError(f"{what}: {error}") from error
        except RequestFailedError as error:
            raise BrokerBusyError(
                f"{what}: {error}", code=error.code, remark=error.remark
            ) from error
        if answer.code == ResponseCode.SUCCESS:
            return str(answer.ext.get("msgId", named.uniq_key))
        if outcome_of(answer) != "unknown":
            raise _refused(what, answer)
        if instance.clock.monotonic() + ASK_AGAIN_S >= deadline:
            raise UnknownOutcomeError(f"{what}: {answer.remark or ''}")
        await instance.clock.sleep(ASK_AGAIN_S)


def _refused(what: str, answer: RemotingCommand) -> BrokerRefusedError:
    remark = answer.remark or ""
    kind = (
        AlreadyDeliveredError
        if answer.code == ResponseCode.ILLEGAL_OPERATION
        else BrokerRefusedError
    )
    return kind(
        f"{what}: refused with code {answer.code}: {remark}", code=answer.code, remark=remark
    )
