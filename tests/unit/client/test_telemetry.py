"""Spans and metrics of sends and consumptions, as OpenTelemetry's own SDK collects them."""

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from opentelemetry import trace
from opentelemetry.propagators.textmap import CarrierT
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.testing import capture_logs

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import BrokerRefusedError, MessageIllegalError
from dledger.client.core.hooks import ConsumeMessageContext
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.telemetry import MAX_BEGUN, OpenTelemetryHook, trace_context_of
from dledger.commitlog.record import decode_record
from dledger.remoting.machine import ThreadExecutor
from dledger.remoting.protocol.codes import ResponseCode
from tests.harness.fake_nodes import fixed
from tests.harness.present import present
from tests.unit.client.consumer.consuming import QUEUE, Heard
from tests.unit.client.fake_cluster import World


class Collected:
    """A hook and what OpenTelemetry collects of it."""

    def __init__(self, propagator: Any = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.hook = OpenTelemetryHook(
            tracer_provider=self.provider,
            meter_provider=self.meters,
            propagator=propagator or TraceContextTextMapPropagator(),
        )

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the ended spans of that name, in the order of their ends."""
        found = self.exporter.get_finished_spans()
        return [span for span in found if name in ("", span.name)]

    def points(self) -> dict[str, list[Any]]:
        """Return the data points of each metric."""
        data = present(self.reader.get_metrics_data())
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def producer(self, client: ClientInstance) -> Producer:
        """Return a producer with the hook."""
        return Producer(client, "p", ProducerConfig(send_message_hooks=(self.hook,)))

    def consumer(self, client: ClientInstance, heard: Any, **more: Any) -> PushConsumer:
        """Return a push consumer with the hook."""
        config = PushConfig(consume_from=FROM_FIRST, consume_message_hooks=(self.hook,), **more)
        return PushConsumer(client, "c", heard, {"T": "*"}, config)


@pytest.fixture
def collected() -> Iterator[Collected]:
    collected = Collected()
    yield collected
    collected.provider.shutdown()
    collected.meters.shutdown()


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = present(span.get_span_context())
    return context.trace_id, context.span_id


async def test_send_and_consumption_are_one_trace(
    world: World, client: ClientInstance, collected: Collected
) -> None:
    tracer = collected.provider.get_tracer("program")
    inner: list[int] = []

    async def listener(_messages: Any, _context: ConsumeContext) -> None:
        inner.append(trace.get_current_span().get_span_context().span_id)

    async with collected.producer(client) as producer:
        with tracer.start_as_current_span("order") as order:
            result = await producer.send(Message("T", b"body", tags="new", keys="o-1 o-2"))
    async with collected.consumer(client, listener):
        while not collected.spans("process T"):
            await trio.sleep(0.1)
    (sent,), (processed,) = collected.spans("send T"), collected.spans("process T")
    assert sent.parent is not None
    assert processed.parent is not None
    assert sent.parent.span_id == order.get_span_context().span_id
    assert (processed.parent.trace_id, processed.parent.span_id) == ids(sent)
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert inner == [ids(processed)[1]]
    assert trace.get_current_span() is trace.INVALID_SPAN
    host, port = (world.group.leader or "").split(":")
    assert dict(sent.attributes or {}) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "T",
        "messaging.destination.partition.id": str(result.message_queue.queue_id),
        "messaging.message.id": result.message_id,
        "messaging.message.body.size": 4,
        "messaging.rocketmq.message.type": "normal",
        "messaging.rocketmq.message.tag": "new",
        "messaging.rocketmq.message.keys": ("o-1", "o-2"),
        "messaging.rocketmq.client_group": "p",
        "server.address": host,
        "server.port": int(port),
    }
    attributes = dict(processed.attributes or {})
    assert attributes["messaging.message.id"] == result.message_id
    assert attributes["messaging.consumer.group.name"] == "c"
    assert attributes["messaging.rocketmq.reconsume_times"] == 0


async def test_context_travels_in_property_traceparent(
    world: World, client: ClientInstance, collected: Collected
) -> None:
    message = Message("T", b"x", properties={"own": "1"})
    async with collected.producer(client) as producer:
        result = await producer.send_to(QUEUE, message)
        alone = await producer.send_to(QUEUE, Message("T", b"y", delay_level=1))
        await producer.send_oneway(Message("T", b"z"), queue=QUEUE)
    assert message.properties == {"own": "1"}
    first = decode_record(world.group.queue("T", QUEUE.queue_id)[0]).property_map
    trace_id, span_id = ids(collected.spans()[0])
    version, *found, flags = first["traceparent"].split("-")
    assert (version, *found) == ("00", f"{trace_id:032x}", f"{span_id:016x}")
    assert int(flags, 16) & 1, "it is sampled"
    assert first["own"] == "1"
    assert first["UNIQ_KEY"] == result.message_id != alone.message_id
    assert len({ids(span) for span in collected.spans("send T")}) == 3
    records = [decode_record(each) for each in world.group.queue("T", QUEUE.queue_id)]
    assert sorted(int(each.property_map["traceparent"].split("-")[2], 16) for each in records) == (
        sorted(ids(span)[1] for span in collected.spans("send T"))
    )
    async with PullConsumer(client, "c") as consumer:
        (pulled, *_) = (await consumer.pull(QUEUE, 0)).messages
        context = trace_context_of(pulled, TraceContextTextMapPropagator())
    assert trace.get_current_span(context).get_span_context().span_id == span_id


async def test_context_of_the_program_is_kept(
    world: World, client: ClientInstance, collected: Collected
) -> None:
    given = f"00-{7:032x}-{9:016x}-01"
    async with collected.producer(client) as producer:
        await producer.send_to(QUEUE, Message("T", b"x", properties={"traceparent": given}))
    stored = decode_record(world.group.queue("T", QUEUE.queue_id)[0])
    assert stored.property_map["traceparent"] == given
    (span,) = collected.spans()
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (7, 9)


async def test_each_message_of_a_batch_has_its_span(
    world: World, client: ClientInstance, collected: Collected
) -> None:
    async with collected.producer(client) as producer:
        sent = await producer.send_batch([Message("T", b"%d" % n) for n in range(3)], queue=QUEUE)
    stored = [decode_record(raw) for raw in world.group.queue("T", QUEUE.queue_id)]
    parents = [record.property_map["traceparent"].split("-")[2] for record in stored]
    spans = collected.spans("send T")
    assert parents == [f"{ids(span)[1]:016x}" for span in spans]
    assert len(set(parents)) == 3
    found = [dict(span.attributes or {}) for span in spans]
    assert [f["messaging.message.id"] for f in found] == [r.message_id for r in sent]
    assert {f["messaging.batch.message_count"] for f in found} == {3}
    heard = Heard()
    async with collected.consumer(client, heard, consume_message_batch_max_size=8):
        await heard.wait_for(3)
        await trio.sleep(1)
    processed = collected.spans("process T")
    assert [f"{span.parent.span_id:016x}" for span in processed if span.parent] == parents


async def test_failed_send_states_its_outcome(
    world: World, client: ClientInstance, collected: Collected
) -> None:
    world.group.intercept(fixed(ResponseCode.NO_PERMISSION, "not allowed"))
    async with collected.producer(client) as producer:
        with pytest.raises(BrokerRefusedError):
            await producer.send(Message("T", b"x"))
    (span,) = collected.spans()
    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "BrokerRefusedError"
    assert attributes["dledger.outcome"] == "not_stored"
    (point,) = collected.points()["messaging.client.sent.messages"]
    assert point.value == 1
    assert point.attributes["error.type"] == "BrokerRefusedError"


async def test_message_given_back_is_an_error_and_a_new_span(
    client: ClientInstance, producer: Producer, collected: Collected
) -> None:
    heard = Heard()
    heard.answer = lambda message, _: (
        None if message.reconsume_times else ConsumeStatus.RECONSUME_LATER
    )
    async with collected.producer(client) as traced:
        await traced.send(Message("T", b"hard"))
    async with collected.consumer(client, heard):
        await heard.wait_for(2)
        await trio.sleep(1)
    first, again = collected.spans("process T")
    assert (first.status.status_code, again.status.status_code) == (
        StatusCode.ERROR, StatusCode.UNSET,
    )  # fmt: skip
    assert first.parent == again.parent
    counts = {
        point.attributes.get("error.type"): point.value
        for point in collected.points()["messaging.client.consumed.messages"]
    }
    assert counts == {"FAILED": 1, None: 1}
    (timed, *_) = collected.points()["messaging.client.operation.duration"]
    assert timed.count == 1


async def test_listener_in_a_thread_has_the_current_span(
    client: ClientInstance, producer: Producer, collected: Collected
) -> None:
    client.executor = ThreadExecutor()
    seen: list[int] = []

    def listener(_messages: list[DeliveredMessage], _context: ConsumeContext) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    await producer.send(Message("T", b"x"))
    async with collected.consumer(client, listener):
        while not collected.spans("process T"):
            await trio.sleep(0.1)
    (span,) = collected.spans("process T")
    assert seen == [ids(span)[1]]
    assert span.parent is None


async def test_poll_leaves_the_current_span_alone(
    client: ClientInstance, producer: Producer, collected: Collected
) -> None:
    await producer.send(Message("T", b"x"))
    consumer = LitePullConsumer(
        client, "c", consume_from=FROM_FIRST, consume_message_hooks=(collected.hook,)
    )
    async with consumer:
        consumer.subscribe("T")
        assert await consumer.poll(timeout_s=5)
        assert trace.get_current_span() is trace.INVALID_SPAN
        await consumer.commit()
    assert len(collected.spans("process T")) == 1


async def test_listener_leaves_no_current_span(
    client: ClientInstance, producer: Producer, collected: Collected
) -> None:
    await producer.send_to(QUEUE, Message("T", b"x"))
    async with PullConsumer(client, "c") as consumer:
        messages = (await consumer.pull(QUEUE, 0)).messages
    context = ConsumeMessageContext("c", messages, QUEUE, is_listener=True)
    collected.hook.consume_message_before(context)
    assert trace.get_current_span() is not trace.INVALID_SPAN
    collected.hook.consume_message_after(context)
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_illegal_message_leaves_no_span_open(
    client: ClientInstance, collected: Collected
) -> None:
    hook = collected.hook
    async with collected.producer(client) as producer:
        with pytest.raises(MessageIllegalError):
            await producer.send(Message("T", b"x", properties={"a": "\x01"}))
    assert len(hook._begun) == 1
    for _ in range(MAX_BEGUN):
        hook.send_message_properties(Message("T", b"x"))
    assert len(hook._begun) == MAX_BEGUN
    assert len(collected.spans()) == 1


async def test_propagator_that_raises_does_not_stop_a_send(client: ClientInstance) -> None:
    class Broken(TraceContextTextMapPropagator):
        def inject(self, carrier: CarrierT, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

    collected = Collected(Broken())
    with capture_logs() as logs:
        async with collected.producer(client) as producer:
            result = await producer.send(Message("T", b"x"))
    assert result.queue_offset == 0
    assert [log["hook"] for log in logs if log["event"] == "hook_failed"] == ["OpenTelemetryHook"]
    collected.meters.shutdown()


async def test_hook_without_provider_adds_nothing(world: World, client: ClientInstance) -> None:
    config = ProducerConfig(send_message_hooks=(OpenTelemetryHook(),))
    async with Producer(client, "p", config) as producer:
        await producer.send_to(QUEUE, Message("T", b"x"))
    stored = decode_record(world.group.queue("T", QUEUE.queue_id)[0])
    assert stored.property_map.keys() == {"UNIQ_KEY"}
