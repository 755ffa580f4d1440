"""Everything a broker shows: RocketMQ 5's metrics where it has them, and those of its Raft group.

Read off tables and counters that exist anyway. Nothing waits, and others are served in between:
a page of 5,000 groups is as many pieces as it takes.

Spec: docs/operate/metrics.md; names and labels are RocketMQ's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

from dledger.commitlog.entry import parse_header
from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.group_api import BrokerGroup, ServiceCounts
from dledger.processors.admin import earliest_message_ms, unflushed_bytes
from dledger.processors.wiring import BrokerProcessors
from dledger.remoting.metrics import Family, Sample, ServerMetrics, family_text
from dledger.remoting.protocol.bodies import ConsumeType
from dledger.remoting.seams import Clock
from dledger.services.throughput import Traffic
from dledger.settings.parts import BrokerSettings
from dledger.state.transactions import TransactionDecision
from dledger.topic_metrics import LOOKS_PER_PIECE, TopicMetrics, bool_text, first_of

LEFT_OUT: Final = Family(
    "dledger_metrics_left_out_series",
    "gauge",
    "Series that are not on this page because there are too many of that metric.",
)

CONSUME_MODES: Final = {
    ConsumeType.CONSUME_ACTIVELY: "pull",
    ConsumeType.CONSUME_PASSIVELY: "push",
    ConsumeType.CONSUME_POP: "pop",
}

T = TypeVar("T")
Samples = Iterable[Sample | None]


@dataclass(frozen=True, slots=True)
class _FirstKept:
    """Where the kept log begins, and when its first message was stored (-1: none yet)."""

    index: int
    position: int
    store_time_ms: int


class LeaderChanges:
    """Counts leaders: another member, or the same one in a new term."""

    def __init__(self, group: BrokerGroup) -> None:
        self.total = 0
        self._group = group
        self._newest: tuple[int, str] | None = None

    def role_changed(self) -> None:
        """Check the leader; to be put into the group's `on_role_change`."""
        status = self._group.status()
        leader = status.get("leader")
        if leader is not None and (status["term"], leader) != self._newest:
            self._newest = (status["term"], leader)
            self.total += 1


READY_LAG_ENTRIES: Final = 1_000
"""Entries: a member that was level with its group is behind by up to this number under load."""


class Readiness:
    """Whether a broker can serve what it should."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._was_level = False

    def not_ready(self) -> list[str]:
        """Return why not, a sentence each; nothing when it can."""
        reasons = []
        status = self._group.status()
        if status.get("leader") is None:
            reasons.append("no leader is known")
        if not self._group.readable:
            reasons.append("a snapshot is filled in: the log is not complete")
        behind = int(status.get("commit_index", 0)) - self._group.state.applied_index
        self._was_level = self._was_level or behind <= 0
        if behind > (READY_LAG_ENTRIES if self._was_level else 0):
            reasons.append(f"{behind} committed entries are not applied yet")
        return reasons


@dataclass(eq=False, repr=False)
class BrokerMetrics:
    """The metrics of one broker."""

    _group: BrokerGroup
    _processors: BrokerProcessors
    _settings: BrokerSettings
    _traffic: Traffic
    _leaders: LeaderChanges
    _given_up_bytes: Mapping[str, int]
    _member: str
    _clock: Clock
    _ports: ServerMetrics | None = None

    def __post_init__(self) -> None:
        self._labels = {
            "cluster": self._settings.broker.cluster_name,
            "node_type": "broker",
            "node_id": self._settings.broker.broker_name,
        }
        self._member_labels = {**self._labels, "member": self._member}
        self._topics = TopicMetrics(self._group, self._traffic, self._clock)
        self._first_kept: _FirstKept | None = None

    def pieces(self) -> Iterator[str]:
        """Yield the page, piece by piece; tables may change between two of them."""
        left_out: dict[str, int] = {}
        state = self._group.state
        self._traffic.keep(
            lambda topic: state.topic_config(topic) is not None,
            lambda group: state.subscription_group(group) is not None,
        )
        for family, samples in chain(
            self._topics.traffic_families(left_out),
            self._topics.consumer_families(left_out),
            self._connection_families(left_out),
            self._storage_families(),
            self._broker_families(),
            self._waiting_families(),
        ):
            yield from family_text(family, samples, self._labels)
        for family, samples in chain(
            self._raft_families(), () if self._ports is None else self._ports.families()
        ):
            yield from family_text(family, samples, self._member_labels)
        counts: Samples = [({"metric": name}, count) for name, count in left_out.items()]
        yield from family_text(LEFT_OUT, counts, self._member_labels)

    # ------------------------------------------------------------------------------ clients

    def _connection_families(self, left_out: dict[str, int]) -> Iterator[tuple[Family, Samples]]:
        producers = Family(
            "rocketmq_producer_connections", "gauge", "Connections of producers, by client."
        )
        yield producers, self._producer_connections(left_out, producers.name)
        consumers = Family(
            "rocketmq_consumer_connections", "gauge", "Connections of consumers, by group."
        )
        yield consumers, self._consumer_connections(left_out, consumers.name)

    def _producer_connections(self, left_out: dict[str, int], name: str) -> Samples:
        clients, kinds, looked = self._processors.clients, {}, 0
        for group in clients.producer_groups():
            # One with several producer groups is one connection.
            for client in clients.producers(group):
                kinds[client.channel] = (client.language, client.version)
                looked += 1
            if looked >= LOOKS_PER_PIECE:
                looked = 0
                yield None
        counts = Counter(kinds.values())
        for language, version in first_of(counts, left_out, name):
            labels = _client_labels(language, version)
            yield labels, counts[(language, version)]

    def _consumer_connections(self, left_out: dict[str, int], name: str) -> Samples:
        counts: Counter[tuple[str, str, int, ConsumeType]] = Counter()
        looked = 0
        for group in list(self._processors.clients.consumer_groups):
            for client in group.clients.values():
                counts[(group.name, client.language, client.version, group.consume_type)] += 1
            looked += len(group.clients)
            if looked >= LOOKS_PER_PIECE:
                looked = 0
                yield None
        for key in first_of(counts, left_out, name):
            group_name, language, version, consume_type = key
            labels = {
                "consumer_group": group_name,
                **_client_labels(language, version),
                "consume_mode": CONSUME_MODES[consume_type],
                "is_system": bool_text(self._topics.is_system_group(group_name)),
            }
            yield labels, counts[key]

    # ------------------------------------------------------------------------------ the node

    def _storage_families(self) -> Iterator[tuple[Family, Samples]]:
        group = self._group
        if not group.readable:
            return
        local = {"storage_type": "local", "storage_medium": "disk"}
        unapplied = max(0, group.log.end_position - group.state.applied_end_position)
        yield _gauge(
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the log that are written and not yet on disk.",
            unflushed_bytes(group),
            local,
        )
        yield _gauge(
            "rocketmq_storage_dispatch_behind_bytes",
            "Bytes of the log that are not applied yet.",
            unapplied,
            local,
        )
        first = self._look_at_first()
        if first is None:
            return
        yield _gauge(
            "rocketmq_storage_size",
            "Bytes of the log that are kept.",
            group.log.end_position - first.position,
            local,
        )
        if first.store_time_ms >= 0:
            yield _gauge(
                "rocketmq_storage_message_reserve_time",
                "Age of the first message that is kept, in milliseconds.",
                max(0, self._clock.wall_ms() - first.store_time_ms),
                local,
            )

    def _look_at_first(self) -> _FirstKept | None:
        """Look at the begin of the log once; again when it is another, or had no message."""
        log, known = self._group.log, self._first_kept
        if known is None or known.index != log.first_index or known.store_time_ms < 0:
            try:
                position = parse_header(log.frame(log.first_index)).position
            except OffsetOutOfRangeError:
                return None
            known = _FirstKept(log.first_index, position, earliest_message_ms(self._group))
            self._first_kept = known
        return known

    def _broker_families(self) -> Iterator[tuple[Family, Samples]]:
        state, limiters = self._group.state, self._processors.limiters
        yield _gauge(
            "rocketmq_broker_permission",
            "What clients may do here: 4 read, 2 write.",
            self._settings.broker.broker_permission,
        )
        yield _gauge("rocketmq_topic_number", "Topics.", state.topics_count)
        yield _gauge(
            "rocketmq_consumer_group_number",
            "Consumer groups that have a configuration.",
            len(state.builtin_groups.keys() | state.subscription_groups.keys()),
        )
        yield (
            Family("rocketmq_processor_watermark", "gauge", "Requests that are not answered yet."),
            [({"processor": name}, limiter.in_use) for name, limiter in limiters.items()],
        )

    def _waiting_families(self) -> Iterator[tuple[Family, Samples]]:
        """Yield what waits for a decision or for its time, and what was decided here."""
        state = self._group.state
        if self._group.leadership is not None:
            yield _gauge(
                "rocketmq_half_messages",
                "Transactions without a decision; known to the leader.",
                len(state.transactions.open),
            )
            yield _gauge(
                "rocketmq_timing_messages",
                "Messages that the timer holds until their time; known to the leader.",
                len(state.timers),
            )
        counts = self._processors.transactions.counts
        for name, about, decision in (
            ("rocketmq_commit_messages_total", "committed", TransactionDecision.COMMIT),
            ("rocketmq_rollback_messages_total", "rolled back", TransactionDecision.ROLLBACK),
        ):
            about = f"Transactions that were {about} while this member led."
            yield _counter(name, about, counts[decision])

    def _raft_families(self) -> Iterator[tuple[Family, Samples]]:
        group, status = self._group, self._group.status()
        leads = group.leadership is not None
        yield _gauge("dledger_is_leader", "1 while this member leads and serves.", int(leads))
        yield _gauge("dledger_term", "Newest term this member has seen.", group.term)
        for key in ("last_index", "commit_index"):
            if key in status:
                yield _gauge(f"dledger_{key}", _ABOUT[key], status[key])
        yield _gauge(
            "dledger_applied_index", "Newest entry that is applied.", group.state.applied_index
        )
        yield _counter(
            "dledger_leader_changes_total", "Leaders this member learned of.", self._leaders.total
        )
        for key in ("contradictions", "truncations", "installs"):
            if key in status:
                name = f"dledger_{_COUNTERS[key][0]}_total"
                yield _counter(name, _COUNTERS[key][1], int(status[key]))
        yield from _peer_families(status, leads=leads)
        for key in (
            "doubtful",
            "damaged",
            "pending_bytes",
            "store_time_ahead_ms",
            "clock_off_ms",
        ):
            if key in status:
                yield _gauge(f"dledger_{key}", _ABOUT[key], int(status[key]))
        yield from _loop_families(status)
        yield _gauge(
            "dledger_registrations_refused",
            "NameServers that refuse this member.",
            len(status.get("registration_refused", ())),
        )
        yield _gauge(
            "dledger_held_pulls",
            "Pulls that found nothing and wait.",
            self._processors.pull.held_count,
        )
        yield _counter(
            "dledger_transactions_given_up_total",
            "Transactions that had no decision in time while this member led.",
            self._processors.transactions.counts[TransactionDecision.GIVEN_UP],
        )
        yield _counter(
            "dledger_expired_messages_total",
            "Messages that reads passed over because their time to live was over.",
            self._processors.throughput.expired,
        )
        yield _gauge(
            "dledger_disk_used_ratio",
            "Used part of the file system that holds the log, 0 to 1, as df counts it.",
            self._processors.space.ratio,
        )
        yield _gauge(
            "dledger_disk_full",
            "1 while the disk has too little space left: a leader refuses sends.",
            int(self._processors.space.is_full),
        )
        yield (
            Family(
                "dledger_retention_bytes_total",
                "counter",
                "Bytes of the log given up while this member led, by cause; forced: not expired.",
            ),
            [({"cause": cause}, size) for cause, size in self._given_up_bytes.items()],
        )
        yield from _service_families(group.service_counts)


_ABOUT: Final = {
    "last_index": "Newest entry of this member's log.",
    "commit_index": "Newest entry this member knows to be committed.",
    "doubtful": "1: acknowledgements of this member may be lost; it has no vote meanwhile.",
    "damaged": "1: entries are missing here until a leader has sent them again.",
    "clock_off_ms": "This member's date minus the one that counts; 0 unless it has jumped lately.",
    "store_time_ahead_ms": "Store time of the newest entry minus this member's date.",
    "pending_bytes": "Proposed and not yet committed; sends are refused at raft.max_pending_bytes.",
}


_COUNTERS: Final = {
    "contradictions": (
        "peer_contradictions",
        "Connections of peers closed because they contradicted this member's own log or term.",
    ),
    "truncations": (
        "log_truncations",
        "Times this member cut entries that were never committed, for those of a new leader.",
    ),
    "installs": ("snapshots_installed", "Snapshots of a leader this member took in."),
}


def _service_families(counts: ServiceCounts) -> Iterator[tuple[Family, Samples]]:
    for name, about, label, counted in (
        (
            "dledger_messages_set_aside_total",
            "Messages a service of this leader could not process, now in its dead letters.",
            "service",
            counts.set_aside,
        ),
        (
            "dledger_service_restarts_total",
            "Unexpected failures of a service of this leader; it ran again.",
            "service",
            counts.restarts,
        ),
        (
            "dledger_forwarded_requests_total",
            "Requests this member carried to the leader, or could not.",
            "outcome",
            counts.forwarded,
        ),
    ):
        yield Family(name, "counter", about), [({label: key}, counted[key]) for key in counted]
    yield _counter(
        "dledger_listener_failures_total",
        "Failures after an applied entry.",
        counts.listener_failures,
    )


def _peer_families(status: Mapping[str, Any], *, leads: bool) -> Iterator[tuple[Family, Samples]]:
    rows: Mapping[str, Mapping[str, Any]] = status.get("peers", {})
    yield (
        Family("dledger_peer_connected", "gauge", "1 while that member can be talked to."),
        [({"peer": name}, int(row["connected"])) for name, row in rows.items()],
    )
    if leads:
        yield (
            Family(
                "dledger_peer_lag_entries",
                "gauge",
                "Entries that member has not acknowledged yet; known to the leader.",
            ),
            [
                ({"peer": name}, max(0, status["last_index"] - row["match_index"]))
                for name, row in rows.items()
                if row["match_index"] is not None
            ],
        )


def _loop_families(status: Mapping[str, Any]) -> Iterator[tuple[Family, Samples]]:
    loop: Mapping[str, float] = status.get("event_loop", {})
    yield _gauge(
        "dledger_event_loop_stall_seconds_max",
        "Longest turn of the event loop in the last minute: nothing else ran meanwhile.",
        loop.get("last_minute_ms", 0.0) / 1000,
    )
    yield _counter(
        "dledger_event_loop_stalls_total",
        "Turns of the event loop that took more than 50 ms.",
        loop.get("stalls", 0),
    )


def _gauge(
    name: str, about: str, value: float, labels: Mapping[str, str] | None = None
) -> tuple[Family, Samples]:
    return Family(name, "gauge", about), [(labels or {}, value)]


def _counter(name: str, about: str, value: float) -> tuple[Family, Samples]:
    return Family(name, "counter", about), [({}, value)]


def _client_labels(language: str, version: int) -> dict[str, str]:
    return {"language": language.lower(), "version": str(version), "protocol_type": "remoting"}
