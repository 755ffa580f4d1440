"""All processors of a broker, made together and put into one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from commitlog.message_id import UniqKeyFactory
from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.capabilities import CapabilitiesProcessor
from dledger.processors.client_table import ClientTable
from dledger.processors.clients import ClientsProcessor
from dledger.processors.message_view import MessageViewProcessor
from dledger.processors.offsets import OffsetsProcessor
from dledger.processors.pull import PullProcessor
from dledger.processors.raft_status import RaftStatusProcessor
from dledger.processors.refusal import not_leader, refusal
from dledger.processors.runtime_info import RuntimeInfoProcessor
from dledger.processors.send import SendProcessor
from dledger.processors.send_records import SendRecordsProcessor
from dledger.processors.topics import TopicsProcessor
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.throughput import Throughput
from remoting.connection import Connection
from remoting.processor import Handled, Handler, Limiter, ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from remoting.seams import Clock, Executor, Rng

MAX_OPEN_SENDS = 100_000
"""Send requests waiting for a majority: above what a group holds pending."""

MAX_OPEN_ADMIN = 1_000
"""Everything else that is answered later; these are rare."""


@dataclass(slots=True)
class BrokerProcessors:
    """The processors, and what the rest of the broker needs of them."""

    topics: TopicView
    clients: ClientTable[Connection]
    offsets: OffsetCommits
    throughput: Throughput
    pull: PullProcessor
    clients_processor: ClientsProcessor
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
        disk_ratio: Callable[[], float] = lambda: 0.0,
    ) -> BrokerProcessors:
        """Make them all and listen to what *group* applies."""
        topics = TopicView(
            group,
            auto_create_topic_enable=auto_create_topic_enable,
            auto_create_group_enable=auto_create_subscription_group,
        )
        clients: ClientTable[Connection] = ClientTable()
        offsets = OffsetCommits(group, clock, interval_s=offset_interval_s)
        throughput = Throughput(clock, group.state)
        salt = int.from_bytes(rng.randbytes(4), "big")
        send = SendProcessor(
            group,
            topics,
            settings,
            clock=clock,
            rng=rng,
            uniq_keys=UniqKeyFactory(settings.store_host[:-4], pid, salt),
        )
        records = SendRecordsProcessor(group, topics, settings)
        pull = PullProcessor(
            group,
            topics,
            clients,
            offsets,
            settings,
            clock=clock,
            executor=executor,
            throughput=throughput,
        )
        offset = OffsetsProcessor(group, topics, offsets, settings)
        admin = TopicsProcessor(group, topics, settings)
        client = ClientsProcessor(group, topics, clients, clock=clock)
        view = MessageViewProcessor(group)
        info = RuntimeInfoProcessor(group, settings, throughput, clock=clock, disk_ratio=disk_ratio)
        sends = Limiter("send", MAX_OPEN_SENDS)
        # A held pull is open until it is answered; the pull processor bounds those itself.
        pulls = Limiter("pull", 2 * settings.max_held_pulls)
        others = Limiter("client", MAX_OPEN_SENDS)
        admins = Limiter("admin", MAX_OPEN_ADMIN)
        code = RequestCode
        handlers: dict[RequestCode, tuple[Handler, Limiter]] = {
            code.SEND_MESSAGE: (send.handle, sends),
            code.SEND_MESSAGE_V2: (send.handle, sends),
            code.SEND_BATCH_MESSAGE: (send.handle, sends),
            code.SEND_RECORDS: (records.handle, sends),
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
            code.HEART_BEAT: (client.heartbeat, others),
            code.UNREGISTER_CLIENT: (client.unregister, others),
            code.GET_CONSUMER_LIST_BY_GROUP: (client.consumer_list, others),
            code.CHECK_CLIENT_CONFIG: (client.check_config, others),
            code.UPDATE_AND_CREATE_TOPIC: (admin.update_and_create, admins),
            code.DELETE_TOPIC_IN_BROKER: (admin.delete, admins),
            code.GET_ALL_TOPIC_CONFIG: (admin.all_topics, admins),
            code.GET_TOPIC_CONFIG: (admin.topic_config, admins),
            code.GET_TOPIC_STATS_INFO: (admin.topic_stats, admins),
            code.GET_BROKER_RUNTIME_INFO: (info.handle, admins),
            code.CAPABILITIES: (CapabilitiesProcessor(settings.broker_name).handle, others),
            code.RAFT_STATUS: (RaftStatusProcessor(group, settings).handle, others),
        }
        for read in READS & handlers.keys():
            handler, limiter = handlers[read]
            handlers[read] = (_when_readable(group, handler), limiter)
        group.on_applied.append(throughput.on_applied)
        group.on_applied.append(pull.on_applied)
        return cls(topics, clients, offsets, throughput, pull, client, handlers)

    def register(self, table: ProcessorTable) -> None:
        """Put every handler into *table*."""
        for code, (handler, limiter) in self.handlers.items():
            table.register(code, handler, limiter)

    async def run(self) -> None:
        """Run what belongs to the processors whatever the role: long polling, client expiry.

        `OffsetCommits.run` and the services of `dledger.services` belong into the leadership.

        Cancellation: Held pulls are dropped with their connections.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pull.run)
            nursery.start_soon(self.clients_processor.run)
            nursery.start_soon(self.throughput.run)


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
        RequestCode.GET_TOPIC_STATS_INFO,
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
