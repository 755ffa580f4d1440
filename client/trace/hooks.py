"""Hooks that make message trace out of sends, consumption and ends of transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from client.core.half_message import LocalTransactionState
from client.core.hooks import (
    CONSUME_CONTEXT_TYPE,
    ConsumeMessageContext,
    ConsumeReturnType,
    EndTransactionContext,
    MessageType,
    SendMessageContext,
)
from client.core.message import Message, MessageExt, SendResult, SendStatus
from client.trace.data import DEFAULT_REGION, TraceBean, TraceContext, TraceType
from client.trace.dispatcher import TraceDispatcher
from commitlog.properties import KEY_SEPARATOR, PROPERTY_MSG_REGION, PROPERTY_TRACE_ON
from remoting.seams import Clock

_STATES: Final = {
    LocalTransactionState.UNKNOWN: "UNKNOW",  # as RocketMQ spells it
    LocalTransactionState.COMMIT: "COMMIT_MESSAGE",
    LocalTransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
}


class SendMessageTraceHook:
    """Traces messages that are stored; of a batch each for itself, so that each is found."""

    def __init__(self, dispatcher: TraceDispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    def send_message_before(self, context: SendMessageContext) -> None:
        """Note when it began."""
        context.mq_trace_context = self._clock.wall_ms()

    def send_message_after(self, context: SendMessageContext) -> None:
        """Trace it, if there is a result, as RocketMQ does."""
        began_ms, result, given = context.mq_trace_context, context.send_result, context.message
        if result is None or not isinstance(began_ms, int):
            return
        results = [result] if isinstance(result, SendResult) else result
        messages = [given] if isinstance(given, Message) else given
        cost_ms = self._clock.wall_ms() - began_ms
        for message, result in zip(messages, results, strict=True):
            if message.topic.startswith(self._dispatcher.topic):
                continue
            self._dispatcher.append(
                TraceContext(
                    TraceType.PUB,
                    began_ms,
                    (_sent(message, result, context),),
                    DEFAULT_REGION,
                    context.producer_group,
                    cost_ms,
                    result.status is SendStatus.SEND_OK,
                )
            )


def _sent(message: Message, result: SendResult, context: SendMessageContext) -> TraceBean:
    return TraceBean(
        result.message_id,
        message.topic,
        message.tags,
        _keys(message),
        context.broker_addr,
        memoryview(message.body).nbytes,
        context.msg_type.value,
        result.offset_message_id,
    )


class ConsumeMessageTraceHook:
    """Traces messages before and after they are consumed."""

    def __init__(
        self, dispatcher: TraceDispatcher, clock: Clock, new_id: Callable[[int], str]
    ) -> None:
        """Prepare; *new_id* makes ids of consumptions out of the wall time in ms."""
        self._dispatcher = dispatcher
        self._clock = clock
        self._new_id = new_id

    def consume_message_before(self, context: ConsumeMessageContext) -> None:
        """Trace that they are handed out."""
        traced = [
            message
            for message in context.msg_list
            if message.properties.get(PROPERTY_TRACE_ON) != "false"
        ]
        if not traced:
            return
        now_ms = self._clock.wall_ms()
        before = TraceContext(
            TraceType.SUB_BEFORE,
            now_ms,
            tuple(
                TraceBean(
                    message.message_id,
                    message.topic,
                    message.tags,
                    message.keys,
                    retry_times=message.reconsume_times,
                )
                for message in traced
            ),
            traced[-1].properties.get(PROPERTY_MSG_REGION, ""),
            context.consumer_group,
            request_id=self._new_id(now_ms),
        )
        context.mq_trace_context = before
        self._dispatcher.append(before)

    def consume_message_after(self, context: ConsumeMessageContext) -> None:
        """Trace what came of it."""
        before = context.mq_trace_context
        if not isinstance(before, TraceContext):
            return
        now_ms = self._clock.wall_ms()
        self._dispatcher.append(
            TraceContext(
                TraceType.SUB_AFTER,
                now_ms,
                before.beans,
                before.region_id,
                before.group_name,
                (now_ms - before.time_stamp_ms) // len(context.msg_list),
                context.success,
                before.request_id,
                ConsumeReturnType[context.props[CONSUME_CONTEXT_TYPE]].value,
            )
        )


class EndTransactionTraceHook:
    """Traces decisions over transactions."""

    def __init__(self, dispatcher: TraceDispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Trace it."""
        message = context.message
        bean = TraceBean(
            context.msg_id,
            message.topic,
            message.tags,
            _keys(message),
            context.broker_addr,
            msg_type=MessageType.TRANS_MSG_COMMIT.value,
            transaction_id=context.transaction_id,
            transaction_state=_STATES[context.transaction_state],
            from_transaction_check=context.from_transaction_check,
        )
        self._dispatcher.append(
            TraceContext(
                TraceType.END_TRANSACTION,
                self._clock.wall_ms(),
                (bean,),
                DEFAULT_REGION,
                context.producer_group,
            )
        )


def _keys(message: Message | MessageExt) -> str:
    keys = message.keys
    return keys if isinstance(keys, str) else KEY_SEPARATOR.join(keys)
