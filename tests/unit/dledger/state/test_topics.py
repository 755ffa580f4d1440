"""Topics a broker is born with."""

from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from dledger.settings.config import load_config
from dledger.settings.parts import empty_tables
from dledger.settings.schema import ConfigFile
from dledger.state.topics import PERM_READ, PERM_WRITE, TopicConfig


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
