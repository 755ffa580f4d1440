"""Message trace of a consumer: its hook, and what sends it."""

from __future__ import annotations

from client.core.client_instance import ClientInstance
from client.producer.producer import trace_dispatcher, unique_ids
from client.trace.dispatcher import TraceDispatcher
from client.trace.hooks import ConsumeMessageTraceHook


def consume_trace(
    instance: ClientInstance, topic: str
) -> tuple[TraceDispatcher, ConsumeMessageTraceHook]:
    """Return what sends trace to *topic*, not yet open, and the hook that gives it something."""
    dispatcher = trace_dispatcher(instance, topic)
    hook = ConsumeMessageTraceHook(dispatcher, instance.clock, unique_ids(instance).create)
    return dispatcher, hook
