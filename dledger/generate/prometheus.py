"""What Prometheus scrapes, and the alerts, each with a section of the page that helps with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

RUNBOOKS: Final = "docs/operate/alerts.md"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    Attributes:
        lasts: For how long the expression is true before anybody is called.
        severity: ``critical``: messages are refused or at risk now; ``warning``: they may be soon.
        summary: One sentence; labels of the series in braces.
    """

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str


ALERTS: Final = (
    Alert(
        "MemberDown",
        'up{job=~"dledger-.*"} == 0',
        "1m",
        "warning",
        "{{ $labels.instance }} does not answer.",
    ),
    Alert(
        "NoLeader",
        "sum by (cluster, node_id) (dledger_is_leader) < 1",
        "30s",
        "critical",
        "No member of {{ $labels.node_id }} leads: sends are refused.",
    ),
    Alert(
        "TwoLeaders",
        "sum by (cluster, node_id) (dledger_is_leader) > 1",
        "1m",
        "warning",
        "A member of {{ $labels.node_id }} that was cut off has not noticed it.",
    ),
    Alert(
        "LeadersComeAndGo",
        "increase(dledger_leader_changes_total[10m]) > 3",
        "0m",
        "warning",
        "{{ $labels.node_id }} changed its leader {{ $value }} times in ten minutes.",
    ),
    Alert(
        "PeerDisconnected",
        "dledger_peer_connected == 0",
        "1m",
        "warning",
        "{{ $labels.member }} cannot talk to {{ $labels.peer }}.",
    ),
    Alert(
        "FollowerBehind",
        "dledger_peer_lag_entries > 10000",
        "5m",
        "warning",
        "{{ $labels.peer }} of {{ $labels.node_id }} is {{ $value }} entries behind.",
    ),
    Alert(
        "NoVote",
        "dledger_damaged + dledger_doubtful > 0",
        "10m",
        "critical",
        "{{ $labels.member }} of {{ $labels.node_id }} has no vote and does not come back.",
    ),
    Alert(
        "PeerContradicts",
        "increase(dledger_peer_contradictions_total[10m]) > 0",
        "0m",
        "critical",
        "A peer contradicted the log or term of {{ $labels.member }}.",
    ),
    Alert(
        "DiskFills",
        "dledger_disk_used_ratio > 0.8",
        "5m",
        "warning",
        "The disk of {{ $labels.member }} is {{ $value | humanizePercentage }} full.",
    ),
    Alert(
        "DiskFull",
        "dledger_disk_used_ratio > 0.89",
        "1m",
        "critical",
        "The disk of {{ $labels.member }} is full: sends are refused from 90 % on.",
    ),
    Alert(
        "MessagesForced",
        'increase(dledger_retention_bytes_total{cause="forced"}[1h]) > 0',
        "0m",
        "critical",
        "{{ $labels.member }} removed messages that had not expired.",
    ),
    Alert(
        "ConsumerLate",
        'rocketmq_consumer_lag_latency{is_system="false",is_retry="false"} > 600000',
        "5m",
        "warning",
        "{{ $labels.consumer_group }} is more than ten minutes behind in {{ $labels.topic }}.",
    ),
    Alert(
        "DeadLetters",
        "increase(rocketmq_send_to_dlq_messages_total[15m]) > 0",
        "0m",
        "warning",
        "{{ $labels.consumer_group }} gave up {{ $value }} messages.",
    ),
    Alert(
        "MessagesSetAside",
        "increase(dledger_messages_set_aside_total[15m]) > 0",
        "0m",
        "warning",
        "{{ $labels.service }} of {{ $labels.node_id }} could not process a message.",
    ),
    Alert(
        "ServiceFails",
        "increase(dledger_service_restarts_total[15m]) > 0",
        "0m",
        "warning",
        "{{ $labels.service }} of {{ $labels.member }} failed and ran again.",
    ),
    Alert(
        "EventLoopStalls",
        "dledger_event_loop_stall_seconds_max > 0.5",
        "5m",
        "warning",
        "{{ $labels.member }} stood still for {{ $value }} s: elections come at 0.8 s.",
    ),
    Alert(
        "MemoryRefuses",
        "increase(dledger_requests_refused_memory_total[5m]) > 0",
        "1m",
        "warning",
        "{{ $labels.node_id }} refuses requests: the memory for them is used up.",
    ),
    Alert(
        "RegistrationRefused",
        "dledger_registrations_refused > 0",
        "1m",
        "critical",
        "A registration is refused at or of {{ $labels.node_id }}: its name belongs to others.",
    ),
    Alert(
        "ClockWrong",
        "abs(dledger_clock_behind_voters_ms) > 1000 or dledger_store_time_ahead_ms > 60000",
        "5m",
        "warning",
        "The date of {{ $labels.member }} of {{ $labels.node_id }} is or was wrong.",
    ),
    Alert(
        "SeriesLeftOut",
        "dledger_metrics_left_out_series > 0",
        "15m",
        "warning",
        "{{ $labels.metric }} has more series than a page shows: do not trust its sums.",
    ),
)


def prometheus_files(
    brokers: Sequence[str], name_servers: Sequence[str], proxies: Sequence[str] = ()
) -> dict[str, str]:
    """Return configuration and rules by file name.

    Args:
        brokers: ``host:port`` of the metrics of each broker; every member of every group.
        name_servers: The same of NameServers; may be empty.
        proxies: The same of proxies.
    """
    jobs = [_job("dledger-broker", brokers)]
    if name_servers:
        jobs.append(_job("dledger-namesrv", name_servers))
    if proxies:
        jobs.append(_job("dledger-proxy", proxies))
    config = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": jobs,
    }
    return {"prometheus.yml": _yaml(config), "alerts.yml": alert_rules()}


def _job(name: str, targets: Sequence[str]) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": list(targets)}]}


def alert_rules() -> str:
    """Return the file with the alert rules."""
    rules = [
        {
            "alert": f"Dledger{alert.name}",
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "runbook": f"{RUNBOOKS}#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    return _yaml({"groups": [{"name": "dledger", "rules": rules}]})


def _yaml(value: object) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=1000))
