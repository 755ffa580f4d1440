"""The topics of a broker in the form of a registration, kept encoded.

Each topic is encoded once, and again when it has changed. A registration with all of them is the
pieces joined; one with differences has only what changed since the version that a NameServer
confirmed.
"""

from __future__ import annotations

from typing import Final

import msgspec
import trio

from dledger.group_api import BrokerGroup
from dledger.state.topic_config import TopicConfig
from remoting.protocol import bodies
from remoting.protocol.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfigSerializeWrapper,
)

TOPICS_PER_TURN: Final = 500
"""Topics encoded before other tasks get their turn: about two milliseconds."""


def wire_topic(config: TopicConfig) -> bodies.TopicConfig:
    """Return a topic as remoting bodies show it."""
    return bodies.TopicConfig(
        topic_name=config.topic,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        attributes=dict(config.attributes),
    )


def data_version(group: BrokerGroup) -> bodies.DataVersion:
    """Return how new the topics of a broker are.

    The term stands first in the version: a newer leader's table is newer, whatever was counted.
    """
    state = group.state
    return bodies.DataVersion(
        timestamp=state.topics_changed_ms,
        counter=state.topics_counter,
        state_version=group.term,
    )


class TopicTable:
    """The encoded topics of one group.

    Attributes:
        encoded: How many topics were encoded so far, a topic that changed again.
    """

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._pieces: dict[str, bytes] = {}
        self._counter: int | None = None
        self._lock = trio.Lock()
        self.encoded = 0

    async def whole(self) -> tuple[DataVersion, bytes]:
        """Return the version now and a registration's body with all topics."""
        async with self._lock:
            await self._catch_up()
            version = data_version(self._group)
            body = b"".join(
                (
                    b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":',
                    version.encode(),
                    b',"topicConfigTable":{',
                    b",".join(self._pieces.values()),
                    b"}}}",
                )
            )
        return version, body

    def since(self, base: DataVersion) -> tuple[DataVersion, bytes] | None:
        """Return the version now and a body with what changed since *base*; None: too much."""
        state = self._group.state
        changed = state.topics_since(base.counter)
        if changed is None:
            return None
        table, removed = {}, []
        for name in changed:
            config = state.topic_config(name)
            if config is None:
                removed.append(name)
            else:
                table[name] = wire_topic(config)
        self.encoded += len(table)
        version = data_version(self._group)
        wrapper = TopicConfigSerializeWrapper(topic_config_table=table, data_version=version)
        body = RegisterBrokerBody(
            topic_config_serialize_wrapper=wrapper, removed_topics=removed or None
        )
        return version, body.encode()

    async def _catch_up(self) -> None:
        state = self._group.state
        while self._counter != state.topics_counter:
            counter = state.topics_counter
            changed = None if self._counter is None else state.topics_since(self._counter)
            if changed is None:
                self._pieces.clear()
                changed = [config.topic for config in state.all_topics()]
            for place, name in enumerate(changed):
                self._encode(name)
                if place % TOPICS_PER_TURN == TOPICS_PER_TURN - 1:
                    await trio.lowlevel.checkpoint()
            self._counter = counter

    def _encode(self, name: str) -> None:
        config = self._group.state.topic_config(name)
        if config is None:
            self._pieces.pop(name, None)
            return
        # A topic has no field without a value, which alone would want the dialect's own writer.
        topic = msgspec.json.encode(wire_topic(config))
        self._pieces[name] = msgspec.json.encode(name) + b":" + topic
        self.encoded += 1
