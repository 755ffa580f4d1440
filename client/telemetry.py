"""OpenTelemetry for sends and consumptions: spans that join into one trace, and metrics.

`OpenTelemetryHook` is a hook of producers and consumers. The context of a send travels with the
message, in properties that the propagator names (``traceparent`` by default), as RocketMQ's Java
clients write it; the span of its consumption, in any process, is a child of it. Names and
attributes are those of OpenTelemetry's conventions for messaging.

Where spans and metrics go is the program's to set up: `opentelemetry.trace.set_tracer_provider` and
`opentelemetry.metrics.set_meter_provider`. Without that the hook does next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from dledger.client.core.hooks import (
    CONSUME_CONTEXT_TYPE,
    ConsumeMessageContext,
    MessageType,
    SendMessageContext,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.remoting.addresses import found_address
from dledger.remoting.machine import TrioClock
from dledger.remoting.seams import Clock

SCOPE: Final = "dledger"
MAX_BEGUN: Final = 10_000
"""Spans of messages that have not left. A message that turns out to be illegal never leaves; its
span ends when as many others have begun after it."""

_SYSTEM: Final = "rocketmq"
_TYPES: Final = {
    MessageType.NORMAL_MSG: "normal",
    MessageType.ORDER_MSG: "fifo",
    MessageType.DELAY_MSG: "delay",
    MessageType.TRANS_MSG_HALF: "transaction",
    MessageType.TRANS_MSG_COMMIT: "transaction",
}

_Begun = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Open:
    """What one hook call keeps for the other."""

    spans: list[Span]
    since_s: float
    token: object = None


class OpenTelemetryHook:
    """Gives each send and each consumption a span, and counts and times them.

    One hook may serve any number of producers and consumers of one event loop::

        hook = OpenTelemetryHook()
        ProducerConfig(send_message_hooks=(hook,))
        PushConfig(consume_message_hooks=(hook,))
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare.

        Args:
            tracer_provider: Makes the spans; None: the one that is set globally.
            meter_provider: Makes the instruments; None: the one that is set globally.
            propagator: Writes and reads contexts; None: the one that is set globally.
            clock: Times sends and consumptions.
        """
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._propagator = propagator or propagate.get_global_textmap()
        self._clock = clock or TrioClock()
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were sent, or failed."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were handed out."
        )
        self._send_time = meter.create_histogram(
            "messaging.client.operation.duration", "s", "From the call of a send to its outcome."
        )
        self._process_time = meter.create_histogram(
            "messaging.process.duration", "s", "From handing messages out to the listener's answer."
        )
        self._begun: dict[_Begun, Span] = {}
        self._open: dict[int, _Open] = {}

    # ------------------------------------------------------------------------------ sends

    def send_message_properties(self, message: Message) -> Mapping[str, str]:
        """Begin the span of *message*, and return the properties that carry its context.

        A message that has a context already keeps it: its span becomes a child of that.
        """
        if self._carried(message.properties or {}):
            return {}
        span = self._tracer.start_span(f"send {message.topic}", kind=SpanKind.PRODUCER)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        key = self._carried(carrier)
        if not key:
            span.end()  # nothing records it
            return {}
        while len(self._begun) >= MAX_BEGUN:
            self._begun.pop(next(iter(self._begun))).end()
        self._begun[key] = span
        return carrier

    def send_message_before(self, context: SendMessageContext) -> None:
        """Give the spans of a send their attributes."""
        spans = []
        for message in _sent_messages(context):
            properties = message.properties or {}
            span = self._begun.pop(self._carried(properties), None)
            if span is None:
                span = self._tracer.start_span(
                    f"send {message.topic}",
                    self._propagator.extract(properties),
                    kind=SpanKind.PRODUCER,
                )
            if span.is_recording():
                span.set_attributes(_send_attributes(context, message))
            spans.append(span)
        self._open[id(context)] = _Open(spans, self._clock.monotonic())

    def send_message_after(self, context: SendMessageContext) -> None:
        """End the spans of a send, and count it."""
        found = self._open.pop(id(context), None)
        if found is None:
            return
        results = _results(context)
        error = context.exception
        for place, span in enumerate(found.spans):
            if place < len(results):
                span.set_attribute("messaging.message.id", results[place].message_id)
            if error is not None:
                span.set_attribute("error.type", type(error).__name__)
                span.set_attribute("dledger.outcome", error.outcome)
                span.set_status(Status(StatusCode.ERROR, str(error)))
            span.end()
        facts = _metric_attributes("send", context.mq.topic, None)
        if error is not None:
            facts["error.type"] = type(error).__name__
        self._sent.add(len(found.spans), facts)
        self._send_time.record(self._clock.monotonic() - found.since_s, facts)

    # ------------------------------------------------------------------------------ consumption

    def consume_message_before(self, context: ConsumeMessageContext) -> None:
        """Begin a span for each message, a child of that of its send.

        Of a listener that is called with one message it is the current span.
        """
        spans = []
        for message in context.msg_list:
            parent = self._propagator.extract(message.properties)
            span = self._tracer.start_span(
                f"process {message.topic}", parent, kind=SpanKind.CONSUMER
            )
            if span.is_recording():
                span.set_attributes(_process_attributes(context, message))
            spans.append(span)
        found = self._open[id(context)] = _Open(spans, self._clock.monotonic())
        if context.is_listener and len(spans) == 1:
            found.token = otel_context.attach(trace.set_span_in_context(spans[0]))

    def consume_message_after(self, context: ConsumeMessageContext) -> None:
        """End the spans, and count the messages."""
        found = self._open.pop(id(context), None)
        if found is None:
            return
        if found.token is not None:
            otel_context.detach(found.token)  # type: ignore[arg-type]  # what attach returned
        returned = context.props.get(CONSUME_CONTEXT_TYPE, "")
        facts = _metric_attributes("process", context.mq.topic, context.consumer_group)
        if not context.success:
            facts["error.type"] = returned
        for span in found.spans:
            if not context.success:
                span.set_attribute("error.type", returned)
                span.set_status(Status(StatusCode.ERROR, context.status))
            span.end()
        self._consumed.add(len(found.spans), facts)
        self._process_time.record(self._clock.monotonic() - found.since_s, facts)

    def _carried(self, properties: Mapping[str, str]) -> _Begun:
        fields = sorted(self._propagator.fields)
        return tuple((name, properties[name]) for name in fields if name in properties)


def trace_context_of(message: MessageExt, propagator: TextMapPropagator | None = None) -> Context:
    """Return the context that came with *message*, for spans of programs that pull or receive."""
    return (propagator or propagate.get_global_textmap()).extract(message.properties)


def _sent_messages(context: SendMessageContext) -> Iterator[Message]:
    if isinstance(context.message, Message):
        yield context.message
    else:
        yield from context.message


def _results(context: SendMessageContext) -> Sequence[SendResult]:
    result = context.send_result
    if result is None:
        return ()
    return (result,) if isinstance(result, SendResult) else result


def _metric_attributes(operation: str, topic: str, group: str | None) -> dict[str, AttributeValue]:
    facts: dict[str, AttributeValue] = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }
    if group is not None:
        facts["messaging.consumer.group.name"] = group
    return facts


def _send_attributes(context: SendMessageContext, message: Message) -> Mapping[str, AttributeValue]:
    facts = {
        **_metric_attributes("send", message.topic, None),
        "messaging.operation.type": "send",
        "messaging.message.body.size": memoryview(message.body).nbytes,
        "messaging.destination.partition.id": str(context.mq.queue_id),
        "messaging.rocketmq.message.type": _TYPES[context.msg_type],
        "messaging.rocketmq.client_group": context.producer_group,
    }
    broker = found_address(context.broker_addr)
    if broker is not None:
        facts["server.address"], facts["server.port"] = broker
    if not isinstance(context.message, Message):
        facts["messaging.batch.message_count"] = len(context.message)
    if message.tags:
        facts["messaging.rocketmq.message.tag"] = message.tags
    if message.keys:
        keys = message.keys.split() if isinstance(message.keys, str) else message.keys
        facts["messaging.rocketmq.message.keys"] = list(keys)
    if message.delay_level:
        facts["messaging.rocketmq.message.delay_time_level"] = message.delay_level
    return facts


def _process_attributes(
    context: ConsumeMessageContext, message: MessageExt
) -> Mapping[str, AttributeValue]:
    facts = {
        **_metric_attributes("process", message.topic, context.consumer_group),
        "messaging.operation.type": "process",
        "messaging.message.id": message.message_id,
        "messaging.message.body.size": len(message.record.body),
        "messaging.destination.partition.id": str(message.queue_id),
        "messaging.rocketmq.reconsume_times": message.reconsume_times,
    }
    if len(context.msg_list) > 1:
        facts["messaging.batch.message_count"] = len(context.msg_list)
    if message.tags:
        facts["messaging.rocketmq.message.tag"] = message.tags
    if message.keys:
        facts["messaging.rocketmq.message.keys"] = message.keys.split()
    return facts
