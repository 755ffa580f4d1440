"""Reads a queue by RocketMQ's PULL_MESSAGE, from the layout of its frames: sockets and JSON alone.

It shares nothing with the client: what it returns are the bytes behind each total size.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

PULL_MESSAGE = 11
FOUND, NOT_FOUND, NO_MATCH, MOVED = 0, 19, 20, 21

Answer = tuple[dict[str, Any], bytes]
"""Header and body."""


def ask(address: str, code: int, fields: dict[str, str]) -> Answer:
    """Send one request with a JSON header; return header and body of the answer."""
    head = json.dumps(
        {"code": code, "language": "JAVA", "version": 407, "opaque": 0, "flag": 0,
         "extFields": fields}
    ).encode()  # fmt: skip
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as link:
        link.sendall(struct.pack(">ii", 4 + len(head), len(head)) + head)
        size, head_size = struct.unpack(">ii", _exactly(link, 8))
        rest = _exactly(link, size - 4)
    assert head_size >> 24 == 0, "a JSON header is answered by one"
    return json.loads(rest[:head_size]), rest[head_size:]


def _exactly(link: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = link.recv(min(size, 1 << 20))
        assert part, "the broker closed the connection"
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pull_all(leader: str, topic: str, queue_id: int, first: int = 0) -> Iterator[bytes]:
    """Yield the stored records of a queue from its first one on.

    Args:
        leader: Address of the broker that leads.
    """
    offset = first
    while True:
        fields = {
            "consumerGroup": "TOOLS_CONSUMER", "topic": topic, "queueId": str(queue_id),
            "queueOffset": str(offset), "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
            "suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0",
            "expressionType": "TAG",
        }  # fmt: skip
        header, body = ask(leader, PULL_MESSAGE, fields)
        assert header["code"] in (FOUND, NOT_FOUND, NO_MATCH, MOVED), header
        at = 0
        while at < len(body):
            (size,) = struct.unpack_from(">i", body, at)
            yield body[at : at + size]
            at += size
        following = int(header["extFields"]["nextBeginOffset"])
        if following == offset:
            return
        offset = following
