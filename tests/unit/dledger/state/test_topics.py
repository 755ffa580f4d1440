"""Topics a broker is born with."""

from __future__ import annotations

from dataclasses import fields

from dledger.config import load_config
from dledger.live_settings import empty_tables
from dledger.remoting.settings import ConfigFile
from dledger.state.topics import (
    PERM_READ,
    PERM_WRITE,
    TRACE_TOPIC,
    SubscriptionGroupConfig,
    TopicConfig,
)


def test_trace_topic_exists_when_enabled() -> None:
    def trace_topics(text: str) -> list[TopicConfig]:
        tables = empty_tables(load_config([ConfigFile("broker.conf", text)]))
        plain = empty_tables(load_config([]))
        return [c for t, c in tables.builtin_topics.items() if t not in plain.builtin_topics]

    read_write = PERM_READ | PERM_WRITE
    assert trace_topics("") == []
    assert trace_topics("msgTraceTopicName=TRACES") == []
    assert trace_topics("traceTopicEnable=true") == [TopicConfig(TRACE_TOPIC, 1, 1, read_write)]
    assert trace_topics("traceTopicEnable=true\nmsgTraceTopicName=TRACES") == [
        TopicConfig("TRACES", 1, 1, read_write)
    ]


def test_record_of_a_group_has_each_of_its_fields() -> None:
    config = SubscriptionGroupConfig(
        "g", False, False, False, True, 2, 3, 4, 5, False, 6, 7, {"a": "b"}, {"type": "c"}
    )
    plain = SubscriptionGroupConfig("")
    assert [
        f.name for f in fields(config) if getattr(config, f.name) == getattr(plain, f.name)
    ] == []
    assert SubscriptionGroupConfig.from_state(config.to_state()) == config


def test_record_of_a_topic_has_each_of_its_fields() -> None:
    config = TopicConfig("T", 2, 3, PERM_READ, "MULTI_TAG", 4, True, {"a": "b"})
    plain = TopicConfig("")
    assert [
        f.name for f in fields(config) if getattr(config, f.name) == getattr(plain, f.name)
    ] == []
    assert TopicConfig.from_state(config.to_state()) == config
