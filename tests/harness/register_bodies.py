"""Registrations in the compressed form of brokers of 4.x."""

from __future__ import annotations

import struct
import zlib

import msgspec

from dledger.remoting.protocol.bodies import RegisterBrokerBody, TopicConfig

_INT = struct.Struct(">i")


def encode_compressed(body: RegisterBrokerBody) -> bytes:
    """Return *body* in the compressed form, as a broker of 4.x sends it."""
    wrapper = body.topic_config_serialize_wrapper
    texts = [_topic_text(config).encode() for config in wrapper.topic_config_table.values()]
    servers = msgspec.json.encode(body.filter_server_list)
    parts = [_sized(wrapper.data_version.encode()), _INT.pack(len(texts)), *map(_sized, texts)]
    return zlib.compress(b"".join([*parts, _sized(servers)]))


def _topic_text(config: TopicConfig) -> str:
    return (
        f"{config.topic_name} {config.read_queue_nums} {config.write_queue_nums} "
        f"{config.perm} {config.topic_filter_type}"
    )


def _sized(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data
