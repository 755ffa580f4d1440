"""All processors of a broker, made together and put into one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from commitlog.message_id import UniqKeyFactory
from dledger.group_api import BrokerGroup
from dledger.processors.admin_requests import admin_handlers
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.capabilities import CapabilitiesProcessor
from dledger.processors.client_calls import ClientCallsProcessor
from dledger.processors.client_queries import ClientQueriesProcessor
from dledger.processors.client_table import ClientTable
from dledger.processors.clients import ClientsProcessor
from dledger.processors.consume_queue_view import ConsumeQueueViewProcessor
from dledger.processors.consume_stats import ConsumeStatsProcessor
from dledger.processors.end_transaction import EndTransactionProcessor
from dledger.processors.key_query import KeyQueryProcessor
from dledger.processors.message_view import MessageViewProcessor
from dledger.processors.offsets import OffsetsProcessor
from dledger.processors.open_producer import OpenProducerProcessor
from dledger.processors.property_filters import PropertyFilters
from dledger.processors.pull import PullProcessor
from dledger.processors.queue_locks import QueueLocksProcessor
from dledger.processors.raft_status import RaftStatusProcessor
from dledger.processors.recall import RecallProcessor, TimerRecalls
from dledger.processors.refusal import not_leader, refusal
from dledger.processors.reply import ReplyProcessor
from dledger.processors.runtime_info import RuntimeInfoProcessor
from dledger.processors.send import SendProcessor
from dledger.processors.send_back import SendBackProcessor
from dledger.processors.send_records import SendRecordsProcessor
from dledger.processors.subscription_groups import SubscriptionGroupsProcessor
from dledger.processors.timer_sends import TimerSends
from dledger.processors.topics import TopicsProcessor
from dledger.services.disk_space import DiskSpace
from dledger.services.every_second import every_second
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.producer_sends import ProducerSends
from dledger.services.queue_locks import LEASE_S, QueueLocks
from dledger.services.table_limits import TableLimits
from dledger.services.throughput import Throughput
from dledger.services.timer_claims import TimerClaims
from dledger.services.transaction_decisions import TransactionDecisions
from remoting.connection import Connection
from remoting.processor import Handled, Handler, Limiter, ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from remoting.seams import Clock, Executor, Rng

MAX_OPEN_SENDS = 100_000
"""Send requests waiting for a majority: above what a group holds pending."""

MAX_OPEN_REPLIES = 10_000
"""Replies that requesters have not confirmed: each keeps its body until then."""

MAX_OPEN_ADMIN = 1_000
"""Everything else that is answered later; these are rare."""


@dataclass(slots=True)
class BrokerProcessors:
    """The processors, and what the rest of the broker needs of them."""

    clock: Clock
    topics: TopicView
    clients: ClientTable[Connection]
    offsets: OffsetCommits
    locks: QueueLocks
    throughput: Throughput
    timer_claims: TimerClaims
    space: DiskSpace
    pull: PullProcessor
    clients_processor: ClientsProcessor
    transactions: TransactionDecisions
    limiters: dict[str, Limiter]
    """How many requests of each kind are open."""
    handlers: dict[RequestCode, tuple[Handler, Limiter]]

    @classmethod
    def build(
        cls,
        group: BrokerGroup,
        settings: BrokerSettings,
        *,
        clock: Clock,
        rng: Rng,
        executor: Executor,
        pid: int,
        auto_create_topic_enable: bool = True,
        auto_create_subscription_group: bool = True,
        offset_interval_s: float = 1.0,
        lock_lease_s: float = LEASE_S,
        limits: TableLimits | None = None,
        disk_ratio: Callable[[], float] = lambda: 0.0,
        disk_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
        expire_soon: Callable[[str], None] = lambda _asked_by: None,
    ) -> BrokerProcessors:
        """Make them all and listen to what *group* applies."""
        topics = TopicView(
            group,
            auto_create_topic_enable=auto_create_topic_enable,
            auto_create_group_enable=auto_create_subscription_group,
            limits=limits,
        )
        clients: ClientTable[Connection] = ClientTable(limits)
        offsets = OffsetCommits(
            group, clock, interval_s=offset_interval_s, limits=limits, shares=topics.shares
        )
        locks = QueueLocks(group, topics, clock, lease_s=lock_lease_s)
        throughput = Throughput(clock, group.state)
        space = DiskSpace(disk_ratio, settings.disk_warning_ratio)
        timer_claims = TimerClaims(group)
        recalls = TimerRecalls(group, timer_claims)
        salt = int.from_bytes(rng.randbytes(4), "big")
        producer_sends = ProducerSends(group)
        send = SendProcessor(
            group,
            topics,
            settings,
            producer_sends,
            clock=clock,
            rng=rng,
            uniq_keys=UniqKeyFactory(settings.store_host[:-4], pid, salt),
            timers=TimerSends(group, settings, clock, recalls),
            space=space,
        )
        records = SendRecordsProcessor(group, topics, settings, producer_sends, space)
        open_producer = OpenProducerProcessor(group)
        reply = ReplyProcessor(group, topics, clients, settings, clock=clock, rng=rng, space=space)
        send_back = SendBackProcessor(group, topics, settings, rng=rng, space=space)
        filters = PropertyFilters(settings)
        transactions = TransactionDecisions(group, topics)
        end_transaction = EndTransactionProcessor(group, topics, transactions, clock=clock)
        pull = PullProcessor(
            group,
            topics,
            clients,
            offsets,
            filters,
            settings,
            locks,
            clock=clock,
            executor=executor,
            throughput=throughput,
        )
        offset = OffsetsProcessor(group, topics, offsets, settings, locks)
        admin = TopicsProcessor(group, topics, settings, clock=clock)
        client = ClientsProcessor(group, topics, clients, filters, clock=clock)
        lock = QueueLocksProcessor(topics, locks)
        groups = SubscriptionGroupsProcessor(group, topics, offsets)
        connected = ClientQueriesProcessor(group, clients)
        calls = ClientCallsProcessor(group, clients, settings)
        view = MessageViewProcessor(group)
        stats = ConsumeStatsProcessor(group, topics, clients, offsets, settings, clock=clock)
        sends = Limiter("send", MAX_OPEN_SENDS)
        # A held pull is open until it is answered; the pull processor bounds those itself.
        pulls = Limiter("pull", 2 * settings.max_held_pulls)
        replies = Limiter("reply", MAX_OPEN_REPLIES)
        others = Limiter("client", MAX_OPEN_SENDS)
        admins = Limiter("admin", MAX_OPEN_ADMIN)
        limiters = {"send": sends, "pull": pulls, "litePull": pulls, "query": others}
        info = RuntimeInfoProcessor(
            group,
            settings,
            throughput,
            clock=clock,
            disk_ratio=disk_ratio,
            disk_bytes=disk_bytes,
            limiters=limiters,
        )
        code = RequestCode
        handlers: dict[RequestCode, tuple[Handler, Limiter]] = {
            code.SEND_MESSAGE: (send.handle, sends),
            code.SEND_MESSAGE_V2: (send.handle, sends),
            code.SEND_BATCH_MESSAGE: (send.handle, sends),
            code.SEND_RECORDS: (records.handle, sends),
            code.SEND_REPLY_MESSAGE: (reply.handle, replies),
            code.SEND_REPLY_MESSAGE_V2: (reply.handle, replies),
            code.OPEN_PRODUCER: (open_producer.handle, admins),
            code.CONSUMER_SEND_MSG_BACK: (send_back.handle, sends),
            code.END_TRANSACTION: (end_transaction.handle, sends),
            code.RECALL_MESSAGE: (RecallProcessor(group, settings, recalls).handle, sends),
            code.PULL_MESSAGE: (pull.handle, pulls),
            code.LITE_PULL_MESSAGE: (pull.handle, pulls),
            code.BULK_PULL: (pull.handle, pulls),
            code.QUERY_CONSUMER_OFFSET: (offset.query_consumer_offset, others),
            code.UPDATE_CONSUMER_OFFSET: (offset.update_consumer_offset, others),
            code.SEARCH_OFFSET_BY_TIMESTAMP: (offset.search_offset, others),
            code.GET_MAX_OFFSET: (offset.max_offset, others),
            code.GET_MIN_OFFSET: (offset.min_offset, others),
            code.GET_EARLIEST_MSG_STORETIME: (offset.earliest_store_time, others),
            code.VIEW_MESSAGE_BY_ID: (view.handle, others),
            code.QUERY_MESSAGE: (KeyQueryProcessor(group, executor).handle, admins),
            code.QUERY_CONSUME_QUEUE: (
                ConsumeQueueViewProcessor(group, clients, filters).handle,
                admins,
            ),
            code.GET_CONSUME_STATS: (stats.of_group, admins),
            code.GET_BROKER_CONSUME_STATS: (stats.of_broker, admins),
            code.QUERY_CONSUME_TIME_SPAN: (stats.time_span, admins),
            code.HEART_BEAT: (client.heartbeat, others),
            code.UNREGISTER_CLIENT: (client.unregister, others),
            code.GET_CONSUMER_LIST_BY_GROUP: (client.consumer_list, others),
            code.CHECK_CLIENT_CONFIG: (client.check_config, others),
            code.LOCK_BATCH_MQ: (lock.lock, others),
            code.UNLOCK_BATCH_MQ: (lock.unlock, others),
            code.UPDATE_AND_CREATE_TOPIC: (admin.update_and_create, admins),
            code.UPDATE_AND_CREATE_TOPIC_LIST: (admin.update_and_create_list, admins),
            code.DELETE_TOPIC_IN_BROKER: (admin.delete, admins),
            code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: (admin.system_topics, admins),
            code.GET_ALL_TOPIC_CONFIG: (admin.all_topics, admins),
            code.GET_TOPIC_CONFIG: (admin.topic_config, admins),
            code.GET_TOPIC_STATS_INFO: (admin.topic_stats, admins),
            code.GET_BROKER_RUNTIME_INFO: (info.handle, admins),
            code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (groups.update_and_create, admins),
            code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (groups.update_and_create_list, admins),
            code.DELETE_SUBSCRIPTIONGROUP: (groups.delete, admins),
            code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (groups.all_groups, admins),
            code.GET_SUBSCRIPTIONGROUP_CONFIG: (groups.group_config, admins),
            code.GET_CONSUMER_CONNECTION_LIST: (connected.consumer_connections, admins),
            code.GET_PRODUCER_CONNECTION_LIST: (connected.producer_connections, admins),
            code.QUERY_TOPIC_CONSUME_BY_WHO: (connected.consumers_of_topic, admins),
            code.QUERY_TOPICS_BY_CONSUMER: (connected.topics_of_consumer, admins),
            code.QUERY_SUBSCRIPTION_BY_CONSUMER: (connected.subscription, admins),
            code.GET_CONSUMER_RUNNING_INFO: (calls.running_info, admins),
            code.CONSUME_MESSAGE_DIRECTLY: (calls.consume_directly, admins),
            code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (calls.consumer_status, admins),
            code.CAPABILITIES: (CapabilitiesProcessor(group, settings.broker_name).handle, others),
            code.RAFT_STATUS: (RaftStatusProcessor(group, settings).handle, others),
        }
        tools = admin_handlers(
            group,
            clients,
            offsets,
            throughput.stats,
            settings,
            clock=clock,
            expire_soon=expire_soon,
        )
        handlers |= {asked: (handler, admins) for asked, handler in tools.items()}
        for read in READS & handlers.keys():
            handler, limiter = handlers[read]
            handlers[read] = (_when_readable(group, handler), limiter)
        group.on_applied.append(throughput.on_applied)
        group.on_applied.append(pull.on_applied)
        group.on_applied.append(open_producer.on_applied)
        group.on_applied.append(locks.on_applied)
        return cls(
            clock,
            topics,
            clients,
            offsets,
            locks,
            throughput,
            timer_claims,
            space,
            pull,
            client,
            transactions,
            {"send": sends, "pull": pulls, "reply": replies, "client": others, "admin": admins},
            handlers,
        )

    def register(self, table: ProcessorTable) -> None:
        """Put every handler into *table*."""
        for code, (handler, limiter) in self.handlers.items():
            table.register(code, handler, limiter)

    def role_changed(self) -> None:
        """Begin or end what lasts for a reign; to be put into the group's `on_role_change`."""
        self.locks.role_changed()
        self.clients_processor.role_changed()

    async def run(self) -> None:
        """Run what belongs to the processors whatever the role: long polling, client expiry.

        `OffsetCommits.run` and the services of `dledger.services` belong into the leadership.

        Cancellation: Held pulls are dropped with their connections.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pull.run)
            nursery.start_soon(self.clients_processor.run)
            nursery.start_soon(every_second, self.clock, self.space.look, self.throughput.look)


READS = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.BULK_PULL,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.VIEW_MESSAGE_BY_ID,
        RequestCode.QUERY_MESSAGE,
        RequestCode.QUERY_CONSUME_QUEUE,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.GET_BROKER_CONSUME_STATS,
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
    }
)
"""What needs queues and log to be as the tables say."""


def _when_readable(group: BrokerGroup, handler: Handler) -> Handler:
    """Refuse while a snapshot is being refilled: the tables are ahead of the log."""

    def handle(connection: Connection, command: RemotingCommand) -> Handled:
        if not group.readable:
            return refusal(command, not_leader(group))
        return handler(connection, command)

    return handle
