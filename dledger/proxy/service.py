"""Every call of apache.rocketmq.v2, in trio: what each does stands in the module of its subject.

::

    server (asyncio, gRPC) ── carried into trio ──► MessagingService
         ▲  streams                                   ├ routes, settings
         │                                            ├ sends, receives, offsets
         └──── push ◄── clients ◄── check-backs, operators ◄── brokers
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

from dledger.client.core.broker_requests import Question
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import RequestTimedOutError
from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import settings
from dledger.proxy.access import Access
from dledger.proxy.caller import Caller
from dledger.proxy.clients import ClientTable, Push, Stream
from dledger.proxy.messages import GROUP_CHARS_MAX, full_name, group_of, received_message, topic_of
from dledger.proxy.offsets import Offsets
from dledger.proxy.open_receives import LAST_MARGIN, OpenReceives, Received
from dledger.proxy.operators import Operators
from dledger.proxy.receives import Receives
from dledger.proxy.renewals import Renewals
from dledger.proxy.routes import (
    BrokerConfigs,
    FormerLeaders,
    endpoints,
    wire_assignments,
    wire_queues,
)
from dledger.proxy.sends import Sends, TransactionId
from dledger.proxy.status import OK, RefusedError, status_of
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.log import get_logger
from dledger.remoting.seams import Clock

EXPIRE_PERIOD_S: Final = 10.0
"""How often silent clients are looked for."""

ANNOUNCED_MAX: Final = 1_000
"""Topics and groups of clients that brokers get to know, together: they refuse a heartbeat of more
than 1,024 as a whole, and would ask no client back then. Clients of others are served, too."""

ROUTED_MAX: Final = 256
"""Topics of a consumer's settings whose brokers are made known before it has its answer: it may
name 100,000. Those of the others are known with the first receive."""

ANY_PRODUCER_PART: Final = 0.25
"""Of check-backs that go to any producer of the topic: one that was started again a moment ago has
sent no transaction yet. The others go to those that have, because others may have no checker."""

ADDRESSES_MAX: Final = 64
"""Of proxies that a client names: each queue of a route repeats them."""

HOST_CHARS_MAX: Final = 255
"""Of one of them; DNS knows no longer name."""

ROUTED_AT_ONCE_MAX: Final = 16
"""Of these under way at a time: NameServers have other clients."""

TAKEN_BACK_AT_ONCE_MAX: Final = 100
"""Groups without clients that brokers hear of at a time: each may wait a second for them."""

_log = get_logger(__name__)

Call = Callable[[Any, Caller], Awaitable[Any]]


def first_kept(wanted: Iterable[str], before: set[str], most: int) -> set[str]:
    """Return at most *most* names of *wanted*, those that were in *before* first. Pure."""
    return set(sorted(wanted, key=lambda name: name not in before)[:most])


class MessagingService:
    """The calls of one proxy."""

    def __init__(
        self,
        instance: ClientInstance,
        address: tuple[str, int],
        accounts: AccountStore | None = None,
    ) -> None:
        """Prepare; *instance* is not open, and used by nothing else.

        *accounts*: every call must be signed by one that may make it; None: none is checked.
        """
        self._accounts = accounts
        self._access = None if accounts is None else Access(accounts)
        self.clients = ClientTable(self._groups_changed)
        self._instance = instance
        self._address = address
        self._configs = BrokerConfigs(instance)
        self._sends = Sends(instance, self._configs)
        self._renewals = Renewals(instance, self._is_alive)
        self._receives = Receives(instance, self._configs, self._renewals.table)
        self._open_receives = OpenReceives(instance.clock, self._receives)
        self._offsets = Offsets(instance, self._configs)
        self._operators = Operators(self.clients, instance.clock, instance.rng)
        self._announced_topics: set[str] = set()
        self._announced_groups: set[str] = set()
        self._due = trio.Event()
        self.calls: Mapping[str, Call] = {
            "QueryRoute": self.query_route,
            "Heartbeat": self.heartbeat,
            "SendMessage": self.send_message,
            "QueryAssignment": self.query_assignment,
            "AckMessage": self._receives.ack,
            "ChangeInvisibleDuration": self._receives.change_invisible,
            "ForwardMessageToDeadLetterQueue": self._receives.forward_to_dead_letters,
            "EndTransaction": self.end_transaction,
            "RecallMessage": self._sends.recall,
            "NotifyClientTermination": self.notify_client_termination,
            "UpdateOffset": self._offsets.update,
            "GetOffset": self._offsets.get,
            "QueryOffset": self._offsets.query,
            "SyncLiteSubscription": self.sync_lite_subscription,
        }
        self.pull_message = self._offsets.pull

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve while the block runs. Sends under way are waited for at its end."""
        async with self._instance, self._sends.open(), trio.open_nursery() as nursery:
            self._open_receives.begin(nursery)
            nursery.start_soon(self._keep_announced)
            nursery.start_soon(self._keep_expiring)
            nursery.start_soon(self._renewals.run)
            nursery.start_soon(FormerLeaders(self._instance).run)
            executor = self._instance.executor
            if self._accounts is not None and executor is not None:
                nursery.start_soon(self._accounts.keep_reading, self._instance.clock, executor)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()

    @property
    def clock(self) -> Clock:
        """The clock that its calls are measured with."""
        return self._instance.clock

    @property
    def renewed_messages(self) -> int:
        """How many messages of push consumers are renewed."""
        return len(self._renewals.table)

    def admit(self, name: str, request: Any, caller: Caller) -> None:
        """Let a call pass. Raises RefusedError: its client may not make it."""
        if self._access is not None:
            self._access.admit(name, request, caller)

    async def in_time(self, call: Call, request: Any, caller: Caller) -> Any:
        """Make a call that ends before its client gives it up.

        Raises RequestTimedOutError: it did not end; what it asked for may have been done.
        """
        clock = self._instance.clock
        caller = caller.begun(clock)
        left_s = caller.left_s(LAST_MARGIN)
        if left_s is None:
            return await call(request, caller)
        with clock.time_out(max(0.0, left_s)):
            return await call(request, caller)
        raise RequestTimedOutError("the time of the call is over; it may have been done")

    def _is_alive(self, client_id: str) -> bool:
        return self.clients.is_alive(client_id, self._now_s())

    def _now_s(self) -> float:
        return self._instance.clock.monotonic()

    # ------------------------------------------------------------------------------ routes

    async def query_route(
        self, request: pb.QueryRouteRequest, caller: Caller
    ) -> pb.QueryRouteResponse:
        """Return every queue of a topic.

        Raises NoRouteError, NoNameServerError: there is no route.
        """
        topic = topic_of(request.topic)
        self.clients.heard(caller.name, self._now_s())
        proxies = self._proxies(request.endpoints)
        route = await self._configs.route(topic)
        types = await self._configs.types(topic)
        queues = wire_queues(route, request.topic, proxies, types)
        return pb.QueryRouteResponse(status=OK, message_queues=queues)

    async def query_assignment(
        self, request: pb.QueryAssignmentRequest, caller: Caller
    ) -> pb.QueryAssignmentResponse:
        """Return what a push consumer receives from.

        Raises NoRouteError, NoNameServerError: there is no route.
        """
        topic, group = topic_of(request.topic), group_of(request.group)
        self.clients.heard(caller.name, self._now_s(), group=group)
        proxies = self._proxies(request.endpoints)
        route = await self._configs.route(topic)
        types = await self._configs.types(topic)
        assignments = wire_assignments(route, request.topic, proxies, types)
        return pb.QueryAssignmentResponse(status=OK, assignments=assignments)

    def _proxies(self, asked: pb.Endpoints) -> pb.Endpoints:
        if not asked.addresses:
            return endpoints([self._address])
        if len(asked.addresses) > ADDRESSES_MAX or any(
            len(each.host) > HOST_CHARS_MAX for each in asked.addresses
        ):
            raise RefusedError(
                pb.ILLEGAL_ACCESS_POINT, f"at most {ADDRESSES_MAX} addresses of proxies are named"
            )
        return asked

    # ------------------------------------------------------------------------------ clients

    async def heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> pb.HeartbeatResponse:
        """Take that a client is there."""
        await trio.lowlevel.checkpoint()
        if not caller.client_id:
            raise RefusedError(pb.CLIENT_ID_REQUIRED, "the call names no client")
        if request.client_type in settings.LITE_CONSUMERS:
            raise RefusedError(pb.UNSUPPORTED, "lite topics are not supported")
        if request.client_type not in (pb.PRODUCER, *settings.CONSUMERS):
            raise RefusedError(pb.UNRECOGNIZED_CLIENT_TYPE, "neither a producer nor a consumer")
        is_consumer = request.client_type in settings.CONSUMERS
        group = group_of(request.group) if is_consumer and request.HasField("group") else ""
        self.clients.heard(caller.name, self._now_s(), group=group)
        return pb.HeartbeatResponse(status=OK)

    async def notify_client_termination(
        self, request: pb.NotifyClientTerminationRequest, caller: Caller
    ) -> pb.NotifyClientTerminationResponse:
        """Forget a client; what it has received and not acknowledged comes again in its time."""
        await trio.lowlevel.checkpoint()
        self.clients.end(caller.name)
        return pb.NotifyClientTerminationResponse(status=OK)

    def open_stream(self, caller: Caller, push: Push) -> Stream | None:
        """Take a telemetry stream; None when the client has no id or no more fit."""
        return self.clients.open_stream(caller.name, push, self._now_s())

    def close_stream(self, caller: Caller, stream: Stream) -> None:
        """Forget a stream that has ended."""
        self.clients.close_stream(caller.name, stream, self._now_s())

    async def telemetry(
        self, command: pb.TelemetryCommand, caller: Caller
    ) -> pb.TelemetryCommand | None:
        """Take one command of a client; return the answer, None when it wants none."""
        kind = command.WhichOneof("command")
        if kind == "settings":
            try:
                self.admit("Telemetry", command, caller)
                answer = await self._settings(command.settings)
            except MQError as error:
                return pb.TelemetryCommand(status=status_of(error))
            self.clients.take_settings(caller.name, command.settings, self._now_s())
            return pb.TelemetryCommand(status=OK, settings=answer)
        await trio.lowlevel.checkpoint()
        if kind == "thread_stack_trace":
            self._operators.answered(command.thread_stack_trace.nonce, command)
        elif kind == "verify_message_result":
            self._operators.answered(command.verify_message_result.nonce, command)
        return None

    async def _settings(self, asked: pb.Settings) -> pb.Settings:
        if asked.HasField("publishing"):
            await trio.lowlevel.checkpoint()
            for topic in asked.publishing.topics:
                topic_of(topic)
            return settings.for_producer(asked)
        if asked.client_type in settings.LITE_CONSUMERS:
            raise RefusedError(pb.UNSUPPORTED, "lite topics are not supported")
        if not asked.HasField("subscription"):
            raise RefusedError(pb.UNRECOGNIZED_CLIENT_TYPE, "neither a producer nor a consumer")
        group_of(asked.subscription.group)
        entries = asked.subscription.subscriptions
        names = list(dict.fromkeys(topic_of(entry.topic) for entry in entries))
        topic = ""
        for first in range(0, len(names), ROUTED_MAX):
            # More of them only while none is known: its brokers state what the group is.
            some = names[first : first + ROUTED_MAX]
            known = await self._make_known(some)
            if known:
                topic = next(name for name in some if name in known)
                break
        group = await self._configs.group(settings.group_of(asked), topic)
        return settings.for_consumer(asked, group)

    async def _make_known(self, topics: Iterable[str]) -> set[str]:
        """Make the brokers of *topics* known; return the topics that have a route."""
        known: set[str] = set()
        places = trio.CapacityLimiter(ROUTED_AT_ONCE_MAX)

        async def find(topic: str) -> None:
            async with places:
                with suppress(MQError):
                    await self._instance.route(topic)
                    known.add(topic)

        async with trio.open_nursery() as nursery:
            for topic in topics:
                nursery.start_soon(find, topic)
        return known

    async def sync_lite_subscription(
        self, request: pb.SyncLiteSubscriptionRequest, caller: Caller
    ) -> pb.SyncLiteSubscriptionResponse:
        """Refuse: there are no lite topics."""
        await trio.lowlevel.checkpoint()
        raise RefusedError(pb.UNSUPPORTED, "lite topics are not supported")

    # ------------------------------------------------------------------------------ messages

    async def send_message(
        self, request: pb.SendMessageRequest, caller: Caller
    ) -> pb.SendMessageResponse:
        """Send; see `Sends.send`."""
        for message in request.messages:
            if message.system_properties.message_type == pb.TRANSACTION:
                topic_of(message.topic)  # refuses what is none
                self.clients.produces(caller.name, message.topic, self._now_s())
        return await self._sends.send(request, caller)

    async def end_transaction(
        self, request: pb.EndTransactionRequest, caller: Caller
    ) -> pb.EndTransactionResponse:
        """Decide a transaction; see `Sends.end_transaction`."""
        answer = await self._sends.end_transaction(request, caller)
        self.clients.produces(caller.name, request.topic, self._now_s())
        return answer

    async def receive_message(
        self, request: pb.ReceiveMessageRequest, caller: Caller, received: Received | None = None
    ) -> Received:
        """Receive; see `OpenReceives.receive`."""
        group_of(request.group)
        self.clients.heard(caller.name, self._now_s(), group=full_name(request.group))
        return await self._open_receives.receive(request, caller, received)

    async def abandon(self, received: Received) -> None:
        """Let what did not reach its client come again; see `OpenReceives.abandon`."""
        await self._open_receives.abandon(received)

    # ------------------------------------------------------------------------------ brokers

    def _groups_changed(self) -> None:
        self._due.set()

    async def _keep_announced(self) -> None:
        """Announce to brokers the groups that are here: they ask back, and operators see them."""
        instance = self._instance
        while True:
            self._due = trio.Event()
            # The topic of a transaction is its group, and names of groups are shorter.
            named = [topic for topic in self.clients.topics if len(topic) <= GROUP_CHARS_MAX]
            topics = first_kept(named, self._announced_topics, ANNOUNCED_MAX)
            groups = first_kept(
                self.clients.groups, self._announced_groups, ANNOUNCED_MAX - len(topics)
            )
            for topic in topics - self._announced_topics:
                instance.check_backs.add(topic, self._ask_back)
                instance.heartbeats.add_producer(topic)
            for group in groups - self._announced_groups:
                instance.heartbeats.add_consumer(group)
                instance.consumer_calls.add(group, self._operators.of_group(group))
            ended_topics = self._announced_topics - topics
            ended_groups = self._announced_groups - groups
            self._announced_topics, self._announced_groups = topics, groups
            for topic in ended_topics:
                instance.check_backs.remove(topic)
            for group in ended_groups:
                instance.consumer_calls.remove(group)
            await self._take_back(ended_topics, ended_groups)
            for topic in topics - await self._make_known(topics):
                _log.info("topic_unknown", topic=topic)
            await self._due.wait()

    async def _take_back(self, topics: Iterable[str], groups: Iterable[str]) -> None:
        """Announce groups no more. A broker that does not answer holds up no later ones."""
        heartbeats = self._instance.heartbeats
        places = trio.CapacityLimiter(TAKEN_BACK_AT_ONCE_MAX)

        async def take_back(remove: Callable[[str], Awaitable[None]], name: str) -> None:
            async with places:
                await remove(name)

        async with trio.open_nursery() as nursery:
            for topic in topics:
                nursery.start_soon(take_back, heartbeats.remove_producer, topic)
            for group in groups:
                nursery.start_soon(take_back, heartbeats.remove_consumer, group)

    async def _keep_expiring(self) -> None:
        while True:
            await self._instance.clock.sleep(EXPIRE_PERIOD_S)
            for client_id in self.clients.expire(self._now_s()):
                _log.info("client_silent", client_id=client_id)
            self._instance.routes.forget_unknown(self._announced_topics)

    def _ask_back(self, question: Question) -> None:
        """Hand a broker's question about a transaction to a producer of its topic."""
        try:
            topic = question.message.topic
            of_any = self._instance.rng.random() < ANY_PRODUCER_PART
            stream = self.clients.producer_stream(topic, of_any=of_any)
            if stream is None or not question.broker_name:
                _log.info("check_back_without_producer", topic=topic)
                return
            message = received_message(question.message, stream.resource_of(topic))
        except CorruptRecordError as error:
            _log.warning("check_back_unreadable", error=str(error))
            return
        message.system_properties.message_type = pb.TRANSACTION
        name = TransactionId(question.broker_name, question.half_offset, question.position)
        command = pb.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=name.encode()
        )
        stream.push(pb.TelemetryCommand(status=OK, recover_orphaned_transaction_command=command))
