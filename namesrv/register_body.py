"""The body of a registration: what a broker serves, as JSON or in RocketMQ's compressed form.

::

    compressed = zlib of
        i32 length · DataVersion as JSON
        i32 count  · per topic: i32 length · "name read write perm filterType[ attributes]"
        i32 length · filter servers as a JSON list
        …            static-topic mappings of 5.x senders, not read

Spec: docs/internals/protocol/remoting.md, section 12.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from typing_extensions import Buffer

from namesrv.errors import BadRegisterBodyError
from remoting.errors import BadRequestError
from remoting.protocol.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    decode_body,
)

MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Largest body after inflating: a frame of 16 MiB could otherwise become 16 GiB of memory."""

_INT: Final = struct.Struct(">i")
_CRC_MASK: Final = 0x7FFFFFFF


def decode_register_body(body: Buffer, *, compressed: bool, crc: int) -> RegisterBrokerBody:
    """Return what a registration has.

    Args:
        body: As it came; empty means a broker without topics.
        crc: CRC-32 without its top bit, as the header gives it; 0 is not checked.
    Raises:
        BadRegisterBodyError: Another checksum, or not the form it claims to have.
    """
    if crc and zlib.crc32(body) & _CRC_MASK != crc:
        raise BadRegisterBodyError("crc32 not match")
    if not memoryview(body).nbytes:
        return RegisterBrokerBody()
    try:
        return _decode_compressed(body) if compressed else RegisterBrokerBody.decode(body)
    except (BadRequestError, struct.error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise BadRegisterBodyError(f"registration cannot be read: {error}") from error


def _decode_compressed(body: Buffer) -> RegisterBrokerBody:
    reader = _Reader(_inflate(body))
    version = DataVersion.decode(reader.sized())
    topics: dict[str, TopicConfig] = {}
    for _ in range(reader.count()):
        config = _topic_config(reader.sized().decode())
        topics[config.topic_name] = config
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            topic_config_table=topics, data_version=version
        ),
        filter_server_list=decode_body(reader.sized() or b"[]", list[str]),
    )


def _inflate(body: Buffer) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(body, MAX_INFLATED_BYTES)
    if inflater.unconsumed_tail:
        raise ValueError(f"more than {MAX_INFLATED_BYTES} bytes when inflated")
    if not inflater.eof:
        raise ValueError("compressed data ends early")
    return data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def count(self) -> int:
        (value,) = _INT.unpack_from(self._data, self._position)
        self._position += _INT.size
        if not 0 <= value <= len(self._data):
            raise ValueError(f"length {value} of {len(self._data)} bytes")
        return int(value)

    def sized(self) -> bytes:
        size = self.count()
        part = self._data[self._position : self._position + size]
        if len(part) != size:
            raise ValueError(f"{size} bytes announced, {len(part)} left")
        self._position += size
        return part


def _topic_config(text: str) -> TopicConfig:
    name, read, write, perm, filter_type, *attributes = text.split(" ", 5)
    return TopicConfig(
        topic_name=name,
        read_queue_nums=int(read),
        write_queue_nums=int(write),
        perm=int(perm),
        topic_filter_type=filter_type,
        attributes=decode_body(attributes[0].encode(), dict[str, str])
        if attributes and attributes[0]
        else {},
    )
