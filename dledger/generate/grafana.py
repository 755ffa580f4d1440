"""A board for Grafana: the cluster at a glance, topics and groups, latencies, Raft, the nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

_ROW_HEIGHT: Final = 8
_WIDTH: Final = 24

_OF = 'cluster=~"$cluster",node_id=~"$group"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: lines over time, or a number.

    Attributes:
        queries: Expression and legend of each line.
        unit: Grafana's name of it.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "At a glance",
        (
            Panel(
                "Groups with a leader",
                ((f"sum(dledger_is_leader{{{_OF}}})", "leaders"),),
                kind="stat",
            ),
            Panel("Members that answer", (('sum(up{job="dledger-broker"})', "up"),), kind="stat"),
            Panel(
                "Messages in /s",
                ((f"sum(rate(rocketmq_messages_in_total{{{_OF}}}[$__rate_interval]))", "in"),),
                "ops",
                "stat",
            ),
            Panel(
                "Oldest message that waits",
                (
                    (
                        f'max(rocketmq_consumer_lag_latency{{{_OF},is_system="false"}})',
                        "oldest",
                    ),
                ),
                "ms",
                "stat",
            ),
        ),
    ),
    (
        "Messages",
        (
            Panel(
                "In, by topic",
                (
                    (
                        "topk(10, sum by (topic) (rate(rocketmq_messages_in_total"
                        f'{{{_OF},is_system="false"}}[$__rate_interval])))',
                        "{{topic}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Out, by group",
                (
                    (
                        "topk(10, sum by (consumer_group) (rate(rocketmq_messages_out_total"
                        f'{{{_OF},is_system="false"}}[$__rate_interval])))',
                        "{{consumer_group}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Bytes in and out",
                (
                    (
                        f"sum(rate(rocketmq_throughput_in_total{{{_OF}}}[$__rate_interval]))",
                        "in",
                    ),
                    (
                        f"sum(rate(rocketmq_throughput_out_total{{{_OF}}}[$__rate_interval]))",
                        "out",
                    ),
                ),
                "Bps",
            ),
            Panel(
                "Size of messages",
                (
                    (
                        "histogram_quantile(0.5, sum by (le) (rate(rocketmq_message_size_bucket"
                        f"{{{_OF}}}[$__rate_interval])))",
                        "half are below",
                    ),
                    (
                        "histogram_quantile(0.99, sum by (le) (rate(rocketmq_message_size_bucket"
                        f"{{{_OF}}}[$__rate_interval])))",
                        "99 % are below",
                    ),
                ),
                "bytes",
            ),
        ),
    ),
    (
        "Consumer groups",
        (
            Panel(
                "Messages that wait",
                (
                    (
                        "topk(10, sum by (consumer_group, topic) (rocketmq_consumer_lag_messages"
                        f'{{{_OF},is_system="false"}}))',
                        "{{consumer_group}} {{topic}}",
                    ),
                ),
            ),
            Panel(
                "Age of the first that waits",
                (
                    (
                        "topk(10, max by (consumer_group, topic) (rocketmq_consumer_lag_latency"
                        f'{{{_OF},is_system="false"}}))',
                        "{{consumer_group}} {{topic}}",
                    ),
                ),
                "ms",
            ),
            Panel(
                "Out by POP and not acknowledged",
                (
                    (
                        "topk(10, sum by (consumer_group) (rocketmq_consumer_inflight_messages"
                        f"{{{_OF}}}))",
                        "{{consumer_group}}",
                    ),
                ),
            ),
            Panel(
                "Dead letters",
                (
                    (
                        "sum by (consumer_group) (increase(rocketmq_send_to_dlq_messages_total"
                        f"{{{_OF}}}[$__rate_interval]))",
                        "{{consumer_group}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Answers",
        (
            Panel(
                "99 % of answers take less than",
                (
                    (
                        "histogram_quantile(0.99, sum by (le, request_code) (rate("
                        f"rocketmq_rpc_latency_bucket{{{_OF}}}[$__rate_interval])))",
                        "{{request_code}}",
                    ),
                ),
                "ms",
            ),
            Panel(
                "Refused requests /s",
                (
                    (
                        "sum by (request_code, response_code) (rate(rocketmq_rpc_latency_count"
                        f'{{{_OF},response_code!="success"}}[$__rate_interval]))',
                        "{{request_code}} {{response_code}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Requests that are not answered yet",
                (
                    (
                        f"sum by (processor) (rocketmq_processor_watermark{{{_OF}}})",
                        "{{processor}}",
                    ),
                ),
            ),
            Panel(
                "Connections",
                ((f"dledger_connections{{{_OF}}}", "{{node_id}} {{member}}"),),
            ),
        ),
    ),
    (
        "Raft",
        (
            Panel(
                "Leaders",
                ((f"dledger_is_leader{{{_OF}}}", "{{node_id}} {{member}}"),),
            ),
            Panel("Term", ((f"dledger_term{{{_OF}}}", "{{node_id}} {{member}}"),)),
            Panel(
                "Entries a follower is behind",
                ((f"dledger_peer_lag_entries{{{_OF}}}", "{{node_id}} {{peer}}"),),
            ),
            Panel(
                "Changes of the leader",
                (
                    (
                        f"increase(dledger_leader_changes_total{{{_OF}}}[$__rate_interval])",
                        "{{node_id}} {{member}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Nodes",
        (
            Panel(
                "Disk used",
                ((f"dledger_disk_used_ratio{{{_OF}}}", "{{node_id}} {{member}}"),),
                "percentunit",
            ),
            Panel(
                "Bytes of the log",
                ((f"rocketmq_storage_size{{{_OF}}}", "{{node_id}}"),),
                "bytes",
            ),
            Panel(
                "Longest turn of the event loop",
                ((f"dledger_event_loop_stall_seconds_max{{{_OF}}}", "{{node_id}} {{member}}"),),
                "s",
            ),
            Panel(
                "Memory of requests",
                ((f"dledger_request_memory_bytes{{{_OF}}}", "{{node_id}} {{member}}"),),
                "bytes",
            ),
        ),
    ),
)


def grafana_files() -> dict[str, str]:
    """Return the board by its file name; it asks for the data source when it is imported."""
    return {"dledger-board.json": json.dumps(board(), indent=2) + "\n"}


def board() -> dict[str, Any]:
    """Return the board as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_place(len(panels) + 1, {"type": "row", "title": title}, 0, top, _WIDTH, 1))
        top += 1
        width = _WIDTH // len(row)
        for place, panel in enumerate(row):
            height = _ROW_HEIGHT // 2 if panel.kind == "stat" else _ROW_HEIGHT
            drawn = _drawn(panel)
            panels.append(_place(len(panels) + 1, drawn, place * width, top, width, height))
        top += _ROW_HEIGHT
    return {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
            }
        ],
        "title": "dledger",
        "uid": "dledger",
        "tags": ["dledger", "rocketmq"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                _variable("cluster", "label_values(dledger_is_leader, cluster)"),
                _variable("group", 'label_values(dledger_is_leader{cluster=~"$cluster"}, node_id)'),
            ]
        },
        "panels": panels,
    }


def _place(
    number: int, panel: dict[str, Any], left: int, top: int, width: int, height: int
) -> dict[str, Any]:
    return {**panel, "id": number, "gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _drawn(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": expression,
                "legendFormat": legend,
                "datasource": source,
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
