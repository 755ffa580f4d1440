"""All processors of a broker, made together; the switchboard and rules that they declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from dledger.broker_settings import BrokerSettings
from dledger.commitlog.message_id import UniqKeyFactory
from dledger.commitlog.properties import reply_topic
from dledger.group_api import BrokerGroup
from dledger.processors.access import AccessProcessor
from dledger.processors.admin import (
    BrokerConfigProcessor,
    BrokerStatsProcessor,
    CleanUpProcessor,
    RuntimeInfoProcessor,
    SlaveSyncProcessor,
)
from dledger.processors.assignment import AssignmentProcessor
from dledger.processors.client_calls import ClientCallsProcessor, ClientQueriesProcessor
from dledger.processors.client_table import ClientTable
from dledger.processors.clients import ClientsProcessor
from dledger.processors.consume_steps import ConsumeStepProcessor
from dledger.processors.destination import Destinations
from dledger.processors.get_message import PropertyFilters, PullChecks
from dledger.processors.groups import ConsumeStatsProcessor, SubscriptionGroupsProcessor
from dledger.processors.handles import (
    MAX_OPEN,
    Limit,
    Places,
    TopicAt,
    handlers_of,
    local_codes,
    register,
    rules_of,
)
from dledger.processors.idempotent_sends import OpenProducerProcessor, ProducerSends
from dledger.processors.locks import QueueLocksProcessor
from dledger.processors.offsets import OffsetsProcessor
from dledger.processors.operator_offsets import CloneOffsetsProcessor, ResetOffsetsProcessor
from dledger.processors.pop import PopProcessor
from dledger.processors.pop_messages import PopMessages
from dledger.processors.pull import PullProcessor
from dledger.processors.queries import (
    ConsumeQueueViewProcessor,
    KeyQueryProcessor,
    MessageViewProcessor,
)
from dledger.processors.raft import CapabilitiesProcessor, RaftChangeProcessor, RaftStatusProcessor
from dledger.processors.reply import ReplyProcessor
from dledger.processors.send import SendProcessor
from dledger.processors.send_back import SendBackProcessor
from dledger.processors.send_records import SendRecordsProcessor
from dledger.processors.timer_sends import RecallProcessor, TimerRecalls, TimerSends
from dledger.processors.topics import TopicsProcessor
from dledger.processors.transactions import EndTransactionProcessor
from dledger.remoting.access.accounts import Rule
from dledger.remoting.connection import Connection
from dledger.remoting.processor import Limiter
from dledger.remoting.processor_table import Handler, ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.seams import Clock, Executor, Rng
from dledger.services.delayed_message import TimerClaims
from dledger.services.half_message import TransactionDecisions
from dledger.services.limits import DiskSpace, TableLimits
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.pop_grants import PopGrants
from dledger.services.queue_locks import QueueLocks
from dledger.services.throughput import Throughput
from dledger.settings_tables import BrokerTable
from dledger.waiting import every_second

PROCESSORS: Final[tuple[type, ...]] = (
    SendProcessor,
    SendRecordsProcessor,
    ConsumeStepProcessor,
    ReplyProcessor,
    SendBackProcessor,
    RecallProcessor,
    OpenProducerProcessor,
    EndTransactionProcessor,
    PullProcessor,
    PopProcessor,
    AssignmentProcessor,
    OffsetsProcessor,
    ResetOffsetsProcessor,
    CloneOffsetsProcessor,
    ClientsProcessor,
    ClientQueriesProcessor,
    ClientCallsProcessor,
    SubscriptionGroupsProcessor,
    ConsumeStatsProcessor,
    TopicsProcessor,
    QueueLocksProcessor,
    KeyQueryProcessor,
    MessageViewProcessor,
    ConsumeQueueViewProcessor,
    RuntimeInfoProcessor,
    BrokerStatsProcessor,
    CleanUpProcessor,
    SlaveSyncProcessor,
    BrokerConfigProcessor,
    AccessProcessor,
    RaftChangeProcessor,
    RaftStatusProcessor,
    CapabilitiesProcessor,
)
"""Every class of a broker that declares handlers."""

LOCAL_ADMIN: Final = local_codes(PROCESSORS)
"""They erase data, or change members, settings of durability and retention: without access
control they come from the broker's own machine, unless `server.open_admin` is on."""


def broker_rules(topic_at: TopicAt, cluster: str) -> dict[int, Rule]:
    """Return the rule of each request code that a broker answers.

    *cluster*: name of the cluster; answering needs no right to its topic for replies.
    """
    return rules_of(PROCESSORS, Places(topic_at, reply_topic(cluster)))


@dataclass(frozen=True, slots=True)
class ProcessorSeams:
    """What the processors take from outside."""

    clock: Clock
    rng: Rng
    executor: Executor
    pid: int


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The file system that holds the log, and what may remove segments.

    Attributes:
        disk_ratio: Used part of the file system, 0 to 1.
        expire_soon: Lets expired segments go at the next check; its argument names the account and
            host of the request.
    """

    disk_ratio: Callable[[], float] = lambda: 0.0
    disk_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)
    expire_soon: Callable[[str], None] = lambda _asked_by: None


@dataclass(frozen=True, slots=True)
class _Shared:
    """What several processors work with."""

    group: BrokerGroup
    settings: BrokerSettings
    seams: ProcessorSeams
    topics: TopicView
    clients: ClientTable[Connection]
    offsets: OffsetCommits
    locks: QueueLocks
    throughput: Throughput
    filters: PropertyFilters
    timer_claims: TimerClaims
    space: DiskSpace
    transactions: TransactionDecisions
    destinations: Destinations


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
    pops: PopGrants
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
        seams: ProcessorSeams,
        tables: BrokerTable | None = None,
        folder: LogFolder | None = None,
    ) -> BrokerProcessors:
        """Make them all, and let them listen to what *group* applies."""
        folder = folder or LogFolder()
        shared = _shared(group, settings, seams, tables or BrokerTable(), folder)
        limiters = _limiters(settings)
        open_producer = OpenProducerProcessor(group)
        checks = _pull_checks(shared)
        pull = PullProcessor(
            group, settings, checks, shared.throughput, seams.clock, seams.executor
        )
        pops, pop_processors = _pops(shared, checks, pull)
        clients = ClientsProcessor(
            group, shared.topics, shared.clients, shared.filters, clock=seams.clock
        )
        processors = (
            *_senders(shared),
            open_producer,
            pull,
            *pop_processors,
            clients,
            *_consumer_tables(shared),
            *_queries(shared),
            *_administration(shared, folder, limiters),
        )
        group.on_applied.append(shared.throughput.on_applied)
        group.on_applied.append(pull.on_applied)
        group.on_applied.append(open_producer.on_applied)
        group.on_applied.append(pops.on_applied)
        group.waiting_reads.append(lambda: pull.held_count + pops.held_count)
        group.on_applied.append(shared.locks.on_applied)
        return cls(
            clock=seams.clock,
            topics=shared.topics,
            clients=shared.clients,
            offsets=shared.offsets,
            locks=shared.locks,
            throughput=shared.throughput,
            timer_claims=shared.timer_claims,
            space=shared.space,
            pull=pull,
            pops=pops,
            clients_processor=clients,
            transactions=shared.transactions,
            limiters={limit.value: limiter for limit, limiter in limiters.items()},
            handlers=handlers_of(processors, limiters, group),
        )

    def register(self, table: ProcessorTable) -> None:
        """Put every handler into *table*."""
        register(table, self.handlers)

    def role_changed(self) -> None:
        """Begin or end what lasts for a leadership; to be put into the group's `on_role_change`."""
        self.locks.role_changed()
        self.pops.role_changed()
        self.clients_processor.role_changed()

    async def run(self) -> None:
        """Run what belongs to the processors whatever the role: long polling, client expiry.

        Cancellation: Held pulls are dropped with their connections.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pull.run)
            nursery.start_soon(self.pops.run)
            nursery.start_soon(self.clients_processor.run)
            nursery.start_soon(
                every_second, self.clock, self.space.measure, self.throughput.record_sample
            )


def register_processors(table: ProcessorTable, group: BrokerGroup, *processors: object) -> None:
    """Put the handlers of processors that the daemon makes itself into *table*."""
    kinds = (Limit.RAFT_CHANGE, Limit.SETTINGS)
    limiters = {limit: Limiter(limit.value, MAX_OPEN[limit]) for limit in kinds}
    register(table, handlers_of(processors, limiters, group))


def _limiters(settings: BrokerSettings) -> dict[Limit, Limiter]:
    most = {**MAX_OPEN, Limit.PULL: 2 * settings.max_held_pulls}
    kinds = (Limit.SEND, Limit.PULL, Limit.POP, Limit.REPLY, Limit.CLIENT, Limit.ADMIN)
    return {limit: Limiter(limit.value, most[limit]) for limit in kinds}


def _shared(
    group: BrokerGroup,
    settings: BrokerSettings,
    seams: ProcessorSeams,
    tables: BrokerTable,
    folder: LogFolder,
) -> _Shared:
    limits = TableLimits(tables)
    topics = TopicView(
        group,
        auto_create_topic_enable=tables.auto_create_topic_enable,
        auto_create_group_enable=tables.auto_create_subscription_group,
        limits=limits,
    )
    space = DiskSpace(folder.disk_ratio, settings.store.disk_space_warning_level_ratio / 100)
    return _Shared(
        group,
        settings,
        seams,
        topics,
        clients=ClientTable(limits),
        offsets=OffsetCommits(
            group,
            seams.clock,
            interval_s=tables.flush_consumer_offset_interval_ms / 1000,
            limits=limits,
            shares=topics.shares,
        ),
        locks=QueueLocks(group, topics, seams.clock, lease_s=tables.lock_lease_ms / 1000),
        throughput=Throughput(seams.clock, group.state),
        filters=PropertyFilters(settings),
        timer_claims=TimerClaims(group),
        space=space,
        transactions=TransactionDecisions(group, topics),
        destinations=Destinations(group, topics, settings, space, seams.rng),
    )


def _senders(shared: _Shared) -> tuple[object, ...]:
    group, settings, topics, seams = shared.group, shared.settings, shared.topics, shared.seams
    clock, rng = seams.clock, seams.rng
    destinations = shared.destinations
    recalls = TimerRecalls(group, shared.timer_claims)
    timers = TimerSends(group, settings, clock, recalls)
    salt = int.from_bytes(rng.randbytes(4), "big")
    uniq_keys = UniqKeyFactory(settings.store_host[:-4], seams.pid, salt)
    sends = ProducerSends(group)
    records = SendRecordsProcessor(group, topics, settings, destinations, sends)
    return (
        SendProcessor(group, settings, destinations, sends, timers, shared.locks, uniq_keys, clock),
        records,
        ConsumeStepProcessor(group, topics, shared.offsets, records),
        ReplyProcessor(group, shared.clients, settings, destinations, clock),
        SendBackProcessor(group, settings, destinations, rng),
        RecallProcessor(group, settings, recalls),
        EndTransactionProcessor(group, topics, shared.transactions, clock=clock),
    )


def _pull_checks(shared: _Shared) -> PullChecks:
    return PullChecks(
        shared.group,
        shared.settings,
        shared.topics,
        shared.clients,
        shared.filters,
        shared.offsets,
        shared.locks,
        shared.seams.clock,
    )


def _pops(
    shared: _Shared, checks: PullChecks, pull: PullProcessor
) -> tuple[PopGrants, tuple[object, ...]]:
    group, settings, topics = shared.group, shared.settings, shared.topics
    offsets = shared.offsets
    messages = PopMessages(
        group,
        topics,
        settings,
        shared.destinations,
        offsets,
        pull,
        shared.locks,
        shared.throughput,
        checks.living,
    )
    pops = PopGrants(group, topics, shared.seams.clock, messages, offsets.drop)
    offsets.check_slot = pops.check_classic
    return pops, (
        PopProcessor(group, settings, topics, checks, offsets, messages, pops, shared.throughput),
        AssignmentProcessor(group, settings, topics, shared.clients, pops),
        ResetOffsetsProcessor(group, shared.clients, offsets, settings, pops),
    )


def _consumer_tables(shared: _Shared) -> tuple[object, ...]:
    group, settings, topics = shared.group, shared.settings, shared.topics
    clients, offsets = shared.clients, shared.offsets
    return (
        OffsetsProcessor(group, topics, offsets, settings, shared.locks),
        CloneOffsetsProcessor(group, clients, offsets),
        SubscriptionGroupsProcessor(group, topics, offsets),
        ConsumeStatsProcessor(group, topics, clients, offsets, settings, clock=shared.seams.clock),
        QueueLocksProcessor(topics, shared.locks),
    )


def _queries(shared: _Shared) -> tuple[object, ...]:
    group, clients = shared.group, shared.clients
    return (
        KeyQueryProcessor(group, shared.seams.executor),
        MessageViewProcessor(group),
        ConsumeQueueViewProcessor(group, clients, shared.filters),
        ClientQueriesProcessor(group, clients, shared.seams.clock),
        ClientCallsProcessor(group, clients, shared.settings),
    )


def _administration(
    shared: _Shared, folder: LogFolder, limiters: Mapping[Limit, Limiter]
) -> tuple[object, ...]:
    group, settings, clock = shared.group, shared.settings, shared.seams.clock
    sends, pulls = limiters[Limit.SEND], limiters[Limit.PULL]
    pools = {"send": sends, "pull": pulls, "litePull": pulls, "query": limiters[Limit.CLIENT]}
    return (
        TopicsProcessor(group, shared.topics, settings, clock=clock),
        RuntimeInfoProcessor(
            group,
            settings,
            shared.throughput,
            clock=clock,
            disk_ratio=folder.disk_ratio,
            disk_bytes=folder.disk_bytes,
            limiters=pools,
        ),
        BrokerStatsProcessor(shared.throughput.stats, clock=clock),
        CleanUpProcessor(group, folder.expire_soon),
        SlaveSyncProcessor(group),
        RaftStatusProcessor(group, settings),
        CapabilitiesProcessor(group, settings.broker.broker_name),
    )
