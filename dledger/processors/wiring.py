"""All processors of a broker, made together; the switchboard and rules that they declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import trio

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
    codes_of,
    handlers_of,
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
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.seams import Clock, Executor, Rng
from dledger.services.delayed_message import TimerClaims
from dledger.services.half_message import TransactionDecisions
from dledger.services.limits import DiskSpace
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.pop_grants import PopGrants
from dledger.services.queue_locks import QueueLocks
from dledger.services.throughput import Throughput
from dledger.settings.parts import BrokerSettings
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

LOCAL_ADMIN: Final = codes_of(PROCESSORS, attrgetter("local"))
"""They erase data, or change members, settings of durability and retention: without access
control they come from the broker's own machine, unless `server.open_admin` is on."""

REPEATABLE: Final = codes_of(
    PROCESSORS, lambda handler: handler.limit in (Limit.CLIENT, Limit.PULL, Limit.POP)
)
"""They read, or say again what is so: a repetition stores no message a second time."""


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
        lacks_segment: Whether it has less space than a segment takes.
        expire_soon: Lets expired segments go at the next check; its argument names the account and
            host of the request.
    """

    disk_ratio: Callable[[], float] = lambda: 0.0
    disk_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)
    expire_soon: Callable[[str], None] = lambda _asked_by: None
    lacks_segment: Callable[[], bool] = lambda: False


class BrokerProcessors:
    """The processors, and what the rest of the broker needs of them.

    Attributes:
        limiters: How many requests of each kind are open.
    """

    def __init__(
        self,
        group: BrokerGroup,
        settings: BrokerSettings,
        seams: ProcessorSeams,
        folder: LogFolder | None = None,
    ) -> None:
        """Make them all, and let them listen to what *group* applies."""
        folder, tables = folder or LogFolder(), settings.broker
        self._group = group
        self._settings = settings
        self._seams = seams
        self.clock = clock = seams.clock
        self.topics = topics = TopicView(group, tables)
        self.clients: ClientTable[Connection] = ClientTable(tables)
        self.offsets = OffsetCommits(group, clock, settings=tables, shares=topics.shares)
        self.offsets.exists = lambda topic: topics.config(topic) is not None
        self.locks = QueueLocks(group, topics, clock, lease_s=tables.lock_lease_ms / 1000)
        self.throughput = Throughput(clock, group.state)
        self._filters = PropertyFilters(settings)
        self.timer_claims = TimerClaims(group)
        self.space = DiskSpace(folder.disk_ratio, settings.store, folder.lacks_segment)
        self.transactions = TransactionDecisions(group, topics)
        self._destinations = Destinations(group, topics, settings, self.space, seams.rng)
        checks = PullChecks(
            group, settings, topics, self.clients, self._filters, self.offsets, self.locks, clock
        )
        self.pull = PullProcessor(group, settings, checks, self.throughput, clock, seams.executor)
        messages = PopMessages(
            group,
            topics,
            settings,
            self._destinations,
            self.offsets,
            self.pull,
            self.locks,
            self.throughput,
            checks.living,
        )
        self.pops = PopGrants(group, topics, clock, messages, self.offsets.drop)
        self.offsets.check_slot = self.pops.check_classic
        self.clients_processor = ClientsProcessor(group, topics, self.clients, self._filters, clock)
        limiters = _limiters(settings)
        self.limiters = {limit.value: limiter for limit, limiter in limiters.items()}
        processors = (
            *self._senders(),
            self.pull,
            *self._consumption(checks, messages),
            self.clients_processor,
            *self._queries(),
            *self._administration(folder, limiters),
        )
        self.handlers = handlers_of(processors, limiters, group)
        group.on_applied.extend(
            (
                self.throughput.on_applied,
                self.pull.on_applied,
                self.pops.on_applied,
            )
        )
        group.waiting_reads.append(lambda: self.pull.held_count + self.pops.held_count)

    def _senders(self) -> tuple[object, ...]:
        group, settings, topics = self._group, self._settings, self.topics
        clock, rng, destinations = self.clock, self._seams.rng, self._destinations
        recalls = TimerRecalls(group, self.timer_claims)
        timers = TimerSends(group, settings, clock, recalls)
        salt = int.from_bytes(rng.randbytes(4), "big")
        uniq_keys = UniqKeyFactory(settings.store_host[:-4], self._seams.pid, salt)
        sends = ProducerSends(group)
        records = SendRecordsProcessor(group, topics, settings, destinations, sends)
        return (
            SendProcessor(
                group, settings, destinations, sends, timers, self.locks, uniq_keys, clock
            ),
            records,
            ConsumeStepProcessor(group, topics, self.offsets, records),
            ReplyProcessor(group, self.clients, settings, destinations, clock),
            SendBackProcessor(group, settings, destinations, rng),
            RecallProcessor(group, settings, recalls),
            OpenProducerProcessor(group),
            EndTransactionProcessor(group, topics, self.transactions, clock),
        )

    def _consumption(self, checks: PullChecks, messages: PopMessages) -> tuple[object, ...]:
        group, settings, topics = self._group, self._settings, self.topics
        clients, offsets, pops = self.clients, self.offsets, self.pops
        return (
            PopProcessor(group, settings, topics, checks, offsets, messages, pops, self.throughput),
            AssignmentProcessor(group, settings, topics, clients, pops),
            ResetOffsetsProcessor(group, clients, offsets, settings, pops),
            OffsetsProcessor(group, topics, offsets, settings, self.locks),
            CloneOffsetsProcessor(group, clients, offsets),
            SubscriptionGroupsProcessor(group, topics, offsets),
            ConsumeStatsProcessor(group, topics, clients, offsets, settings, self.clock),
            QueueLocksProcessor(topics, self.locks),
        )

    def _queries(self) -> tuple[object, ...]:
        group, clients = self._group, self.clients
        return (
            KeyQueryProcessor(group, self._seams.executor),
            MessageViewProcessor(group),
            ConsumeQueueViewProcessor(group, clients, self._filters),
            ClientQueriesProcessor(group, clients, self.clock),
            ClientCallsProcessor(group, clients, self._settings),
        )

    def _administration(
        self, folder: LogFolder, limiters: Mapping[Limit, Limiter]
    ) -> tuple[object, ...]:
        group, settings, clock = self._group, self._settings, self.clock
        sends, pulls = limiters[Limit.SEND], limiters[Limit.PULL]
        pools = {"send": sends, "pull": pulls, "litePull": pulls, "query": limiters[Limit.CLIENT]}
        return (
            TopicsProcessor(group, self.topics, self.offsets, settings, clock),
            RuntimeInfoProcessor(
                group, settings, self.throughput, clock, folder.disk_ratio, pools, folder.disk_bytes
            ),
            BrokerStatsProcessor(self.throughput.stats, clock=clock),
            CleanUpProcessor(group, folder.expire_soon),
            SlaveSyncProcessor(group),
            RaftStatusProcessor(group, settings),
            CapabilitiesProcessor(group, settings.broker.broker_name),
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
