"""`dledger-proxy` in front of real brokers, called as a client of its protocol calls it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
import trio
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from dledger.cli.local_cluster import LocalCluster, Node, local_cluster
from dledger.cli.ports import free_ports
from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import running_info
from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.access import signature
from dledger.proxy.messages import duration, timestamp
from dledger.proxy.routes import endpoints
from dledger.remoting.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import ConsumeDirectlyHeader
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import messages_at

pytestmark = pytest.mark.slow

LOOK_S = 0.05
TOPIC = pb.Resource(name="Orders")
GROUP = pb.Resource(name="clerks")
METADATA = (("x-mq-client-id", "a client"), ("x-mq-language", "PYTHON"))
FIRST = pb.MessageQueue(topic=TOPIC, id=0, broker=pb.Broker(name="broker-a"))


class Proxy:
    """Calls one proxy, each call in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._methods = pb.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name

    async def call(self, name: str, request: Any, metadata: Any = METADATA) -> Any:
        """Return the answer, or the list of answers."""
        method = self._methods[name]
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = make(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

        def wait() -> Any:
            answer = call(request, timeout=20, metadata=metadata)
            return list(answer) if method.server_streaming else answer

        return await trio.to_thread.run_sync(wait)

    async def send(self, *messages: pb.Message) -> Any:
        """Send and return the answer."""
        return await self.call("SendMessage", pb.SendMessageRequest(messages=messages))

    async def receive(self, topic: pb.Resource = TOPIC, **asked: Any) -> list[pb.Message]:
        """Receive what there is."""
        queue = pb.MessageQueue(topic=topic, broker=pb.Broker(name="broker-a"))
        given = {
            "batch_size": 16,
            "invisible_duration": duration(30_000),
            "long_polling_timeout": duration(5_000),
        }
        answers = await self.call(
            "ReceiveMessage",
            pb.ReceiveMessageRequest(group=GROUP, message_queue=queue, **{**given, **asked}),
        )
        return [answer.message for answer in answers if answer.HasField("message")]


@contextmanager
def called(address: str) -> Iterator[Proxy]:
    with grpc.insecure_channel(address) as channel:
        yield Proxy(channel)


@asynccontextmanager
async def proxies(folder: Path, count: int = 1) -> AsyncIterator[LocalCluster]:
    async with local_cluster(
        folder, brokers=1, settings=SMALL_FILES, proxies=free_ports(count)
    ) as cluster:
        async with connect([cluster.namesrv_address]) as client:
            admin = Admin(client)
            await admin.create_topic("Orders", queue_nums=1)
            await admin.create_topic("Plain", queue_nums=1, attributes={"message.type": "NORMAL"})
        yield cluster


def message(body: str, topic: pb.Resource = TOPIC, **system: Any) -> pb.Message:
    given = {"message_id": f"01{body}", "message_type": pb.NORMAL, "body_encoding": pb.IDENTITY}
    properties = pb.SystemProperties(**{**given, **system})
    return pb.Message(topic=topic, system_properties=properties, body=body.encode())


async def test_routes_types_and_batches(tmp_path: Path) -> None:
    async with proxies(tmp_path) as cluster:
        with called(cluster.proxies["proxy0"].address) as proxy:
            mine = endpoints([("proxy.example", 8081)])
            asked = pb.QueryRouteRequest(topic=TOPIC, endpoints=mine)
            route = await proxy.call("QueryRoute", asked)
            (queue,) = route.message_queues
            assert (queue.id, queue.permission) == (0, pb.READ_WRITE)
            assert (queue.broker.name, queue.broker.id) == ("broker-a", 0)
            assert queue.broker.endpoints == mine
            plain = pb.Resource(name="Plain")
            route = await proxy.call("QueryRoute", pb.QueryRouteRequest(topic=plain))
            assert list(route.message_queues[0].accept_message_types) == [pb.NORMAL]
            (own,) = route.message_queues[0].broker.endpoints.addresses
            assert f"{own.host}:{own.port}" == cluster.proxies["proxy0"].address
            unknown = pb.QueryRouteRequest(topic=pb.Resource(name="Nowhere"))
            answer = await proxy.call("QueryRoute", unknown)
            assert answer.status.code == pb.TOPIC_NOT_FOUND

            late = message("late", plain, message_type=pb.DELAY, delivery_timestamp=timestamp(1))
            refused = await proxy.send(late)
            assert refused.status.code == pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
            sent = await proxy.send(*(message(f"b{number}") for number in range(5)))
            assert sent.status.code == pb.OK
            assert [entry.offset for entry in sent.entries] == [0, 1, 2, 3, 4]
            assert [entry.message_id for entry in sent.entries] == [f"01b{n}" for n in range(5)]
        stored = await messages_at(cluster.namesrv_address, "Orders")
        assert [(each.body, each.message_id) for each in stored] == [
            (b"b%d" % number, f"01b{number}") for number in range(5)
        ]
        assert await messages_at(cluster.namesrv_address, "Plain") == []


async def test_offsets_and_dead_letters(tmp_path: Path) -> None:
    async with proxies(tmp_path) as cluster:
        with called(cluster.proxies["proxy0"].address) as proxy:
            await proxy.send(*(message(f"b{number}") for number in range(5)))
            reader = pb.Resource(name="readers")
            pulled = await proxy.call(
                "PullMessage",
                pb.PullMessageRequest(group=reader, message_queue=FIRST, offset=2, batch_size=2),
            )
            assert [each.message.body for each in pulled if each.HasField("message")] == [
                b"b2",
                b"b3",
            ]
            assert pulled[-1].next_offset == 4
            asked = pb.GetOffsetRequest(group=reader, message_queue=FIRST)
            answer = await proxy.call("GetOffset", asked)
            assert answer.status.code == pb.OFFSET_NOT_FOUND
            update = pb.UpdateOffsetRequest(group=reader, message_queue=FIRST, offset=4)
            assert (await proxy.call("UpdateOffset", update)).status.code == pb.OK
            assert (await proxy.call("GetOffset", asked)).offset == 4
            for policy, offset in ((pb.BEGINNING, 0), (pb.END, 5)):
                query = pb.QueryOffsetRequest(message_queue=FIRST, query_offset_policy=policy)
                assert (await proxy.call("QueryOffset", query)).offset == offset

            first, second, *_ = await proxy.receive()
            assert (first.body, first.system_properties.delivery_attempt) == (b"b0", 1)
            forward = pb.ForwardMessageToDeadLetterQueueRequest(
                group=GROUP,
                topic=TOPIC,
                receipt_handle=first.system_properties.receipt_handle,
                message_id="01b0",
                delivery_attempt=1,
                max_delivery_attempts=3,
            )
            answer = await proxy.call("ForwardMessageToDeadLetterQueue", forward)
            assert answer.status.code == pb.OK
            # A receipt that is old makes no second dead letter.
            answer = await proxy.call("ForwardMessageToDeadLetterQueue", forward)
            assert answer.status.code == pb.INVALID_RECEIPT_HANDLE
            entries = [
                pb.AckMessageEntry(
                    message_id=each.system_properties.message_id,
                    receipt_handle=each.system_properties.receipt_handle,
                )
                for each in (first, second)
            ]
            acked = await proxy.call(
                "AckMessage", pb.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)
            )
            assert acked.status.code == pb.MULTIPLE_RESULTS
            assert [entry.status.code for entry in acked.entries] == [
                pb.INVALID_RECEIPT_HANDLE,
                pb.OK,
            ]
        (dead,) = await messages_at(cluster.namesrv_address, "%DLQ%clerks")
        assert dead.body == b"b0"
        assert dead.properties["DLQ_ORIGIN_TOPIC"] == "Orders"


async def test_any_proxy_goes_on_with_what_one_began(tmp_path: Path) -> None:
    async with proxies(tmp_path, 2) as cluster:
        with (
            called(cluster.proxies["proxy0"].address) as one,
            called(cluster.proxies["proxy1"].address) as other,
        ):
            half = await one.send(message("half", message_type=pb.TRANSACTION))
            await one.send(message("plain"))
            (received,) = await one.receive()
            assert received.body == b"plain"
            assert await cluster.stop("proxy0") == 0
            entry = pb.AckMessageEntry(
                message_id="01plain", receipt_handle=received.system_properties.receipt_handle
            )
            ack = pb.AckMessageRequest(group=GROUP, topic=TOPIC, entries=[entry])
            assert (await other.call("AckMessage", ack)).status.code == pb.OK
            assert (await other.call("AckMessage", ack)).status.code == pb.INVALID_RECEIPT_HANDLE
            end = pb.EndTransactionRequest(
                topic=TOPIC,
                message_id="01half",
                transaction_id=half.entries[0].transaction_id,
                resolution=pb.COMMIT,
                source=pb.SOURCE_CLIENT,
            )
            for _ in range(2):
                assert (await other.call("EndTransaction", end)).status.code == pb.OK
            end.resolution = pb.ROLLBACK
            answer = await other.call("EndTransaction", end)
            assert answer.status.code == pb.PRECONDITION_FAILED
            (received,) = await other.receive()
            assert received.body == b"half"
            assert received.system_properties.message_type == pb.TRANSACTION


async def test_operators_reach_a_client_by_its_stream(tmp_path: Path) -> None:
    async with proxies(tmp_path) as cluster:
        address = cluster.proxies["proxy0"].address
        asked, send = trio.open_memory_channel[pb.TelemetryCommand](16), Queue[Any]()
        trio_token = trio.lowlevel.current_trio_token()

        def talk() -> None:
            """Say what the client is, and answer what it is asked."""
            with grpc.insecure_channel(address) as channel:
                stream = channel.stream_stream(
                    "/apache.rocketmq.v2.MessagingService/Telemetry",
                    request_serializer=pb.TelemetryCommand.SerializeToString,
                    response_deserializer=pb.TelemetryCommand.FromString,
                )
                for command in stream(iter(send.get, None), metadata=METADATA):
                    trio.from_thread.run_sync(asked[0].send_nowait, command, trio_token=trio_token)

        subscription = pb.Subscription(
            group=GROUP, subscriptions=[pb.SubscriptionEntry(topic=TOPIC)]
        )
        settings = pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
        send.put(pb.TelemetryCommand(settings=settings))
        async with trio.open_nursery() as nursery:
            talking = partial(trio.to_thread.run_sync, talk, abandon_on_cancel=True)
            nursery.start_soon(talking)
            nursery.cancel_scope.deadline = trio.current_time() + 40
            answer = await asked[1].receive()
            assert answer.settings.subscription.receive_batch_size == 32
            async with connect([cluster.namesrv_address]) as sdk:
                await sdk.route("Orders")
                admin = Admin(sdk)
                with trio.fail_after(60):
                    while not (found := await admin.consumer_connection("clerks")):
                        await trio.sleep(LOOK_S)
                (member,) = found.connection_set
                infos: list[ConsumerRunningInfo] = []

                async def look() -> None:
                    infos.append(
                        await running_info(
                            sdk, "clerks", member.client_id, "broker-a", with_stacks=True
                        )
                    )

                async with trio.open_nursery() as looking:
                    looking.start_soon(look)
                    command = await asked[1].receive()
                    nonce = command.print_thread_stack_trace_command.nonce
                    trace = pb.ThreadStackTrace(nonce=nonce, thread_stack_trace="main: busy")
                    send.put(pb.TelemetryCommand(thread_stack_trace=trace))
                assert infos[0].jstack == "a client\nmain: busy"

                with called(address) as proxy:
                    await proxy.send(message("one"))
                (stored,) = await messages_at(cluster.namesrv_address, "Orders")
                header = ConsumeDirectlyHeader(
                    "clerks", stored.offset_message_id, member.client_id, "broker-a"
                )
                answers: list[ConsumeMessageDirectlyResult] = []

                async def consume() -> None:
                    answer = await sdk.ask_leader(
                        "broker-a",
                        RequestCode.CONSUME_MESSAGE_DIRECTLY,
                        dict(header.encode()),
                        topic="Orders",
                    )
                    answers.append(ConsumeMessageDirectlyResult.decode(answer.body))

                async with trio.open_nursery() as consuming:
                    consuming.start_soon(consume)
                    command = await asked[1].receive()
                    assert command.verify_message_command.message.body == b"one"
                    result = pb.VerifyMessageResult(nonce=command.verify_message_command.nonce)
                    failed = pb.Status(code=pb.FAILED_TO_CONSUME_MESSAGE, message="no paper")
                    send.put(pb.TelemetryCommand(status=failed, verify_message_result=result))
                assert (answers[0].consume_result, answers[0].remark) == ("CR_LATER", "no paper")
            send.put(None)


async def test_calls_out_of_place_have_their_codes(tmp_path: Path) -> None:
    async with proxies(tmp_path) as cluster:
        address = cluster.proxies["proxy0"].address
        with called(address) as proxy, grpc.insecure_channel(address) as channel:
            beat = pb.HeartbeatRequest(client_type=pb.PRODUCER)
            answer = await proxy.call("Heartbeat", beat, metadata=())
            assert answer.status.code == pb.CLIENT_ID_REQUIRED
            assert (await proxy.call("Heartbeat", beat)).status.code == pb.OK
            answer = await proxy.call("Heartbeat", pb.HeartbeatRequest())
            assert answer.status.code == pb.UNRECOGNIZED_CLIENT_TYPE
            lite = pb.SyncLiteSubscriptionRequest(topic=TOPIC, group=GROUP)
            answer = await proxy.call("SyncLiteSubscription", lite)
            assert answer.status.code == pb.UNSUPPORTED
            assert (await proxy.send()).status.code == pb.MESSAGE_CORRUPTED
            assert await proxy.receive(long_polling_timeout=duration(100)) == []

            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            healthy = await trio.to_thread.run_sync(check, health_pb2.HealthCheckRequest())
            assert healthy.status == health_pb2.HealthCheckResponse.SERVING
            reflect = channel.unary_unary("/grpc.reflection.v1.ServerReflection/Info")
            with pytest.raises(grpc.RpcError) as caught:
                await trio.to_thread.run_sync(reflect, b"")
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert await cluster.stop("proxy0") == 0


def signed(access_key: str, secret_key: str) -> tuple[tuple[str, str], ...]:
    time = "20261124T150000Z"
    text = f"SignedHeaders=x-mq-date-time, Signature={signature(secret_key, time)}"
    authorization = f"MQv2-HMAC-SHA1 Credential={access_key}, {text}"
    return (*METADATA, ("x-mq-date-time", time), ("authorization", authorization))


async def test_calls_without_a_right_are_refused(tmp_path: Path) -> None:
    accounts, config = tmp_path / "accounts.toml", tmp_path / "proxy.toml"
    accounts.write_text(
        "[accounts.clerk-key]\nsecret_key = '0123456789'\ntopics = {Orders = 'PUB'}\n"
    )
    config.write_text(f"[server]\nacl_enable = true\nacl_file = '{accounts}'\n")
    async with proxies(tmp_path, 0) as cluster:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        options = ("-c", str(config), "--namesrv", cluster.namesrv_address, "--listen", address)
        log = cluster.folder / "checked.log"
        cluster.proxies["checked"] = Node("checked", address, ("proxy", *options), log)
        await cluster.start("checked")
        await cluster.wait_proxies()
        with called(address) as proxy:
            for topic, metadata, code in (
                ("Orders", METADATA, pb.UNAUTHORIZED),
                ("Orders", signed("clerk-key", "9876543210"), pb.UNAUTHORIZED),
                ("Plain", signed("clerk-key", "0123456789"), pb.FORBIDDEN),
                ("Orders", signed("clerk-key", "0123456789"), pb.OK),
            ):
                one = message("one", pb.Resource(name=topic))
                asked = pb.SendMessageRequest(messages=[one])
                answer = await proxy.call("SendMessage", asked, metadata=metadata)
                assert answer.status.code == code
            receive = pb.ReceiveMessageRequest(group=GROUP, message_queue=FIRST)
            metadata = signed("clerk-key", "0123456789")
            (answer,) = await proxy.call("ReceiveMessage", receive, metadata=metadata)
            assert answer.status.code == pb.FORBIDDEN
        (stored,) = await messages_at(cluster.namesrv_address, "Orders")
        assert stored.body == b"one"
        assert await messages_at(cluster.namesrv_address, "Plain") == []
