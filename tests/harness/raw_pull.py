"""Reads a queue by RocketMQ's PULL_MESSAGE, from the layout of its frames: sockets and JSON alone.

It shares nothing with the client: what it returns are the bytes behind each total size.
"""

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

PULL_MESSAGE, QUERY_CONSUMER_OFFSET, SEND_BACK = 11, 14, 36
FOUND, NOT_FOUND, NO_MATCH, MOVED = 0, 19, 20, 21


Request = tuple[int, dict[str, str], bytes]
"""Code, fields and body."""

Answer = tuple[dict[str, Any], bytes]
"""Header and body."""


def ask(address: str, code: int, fields: dict[str, str]) -> Answer:
    """Send one request with a JSON header; return header and body of the answer."""
    return ask_together(address, [(code, fields, b"")])[0]


def ask_together(address: str, requests: Sequence[Request]) -> list[Answer]:
    """Send requests on one connection without waiting; return the answer to each."""
    frames = []
    for opaque, (code, fields, body) in enumerate(requests):
        head = json.dumps(
            {"code": code, "language": "JAVA", "version": 407, "opaque": opaque, "flag": 0,
             "extFields": fields}
        ).encode()  # fmt: skip
        frames.append(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
    host, _, port = address.rpartition(":")
    answers: dict[int, Answer] = {}
    with socket.create_connection((host, int(port)), 30) as link:
        link.sendall(b"".join(frames))
        while len(answers) < len(requests):
            size, head_size = struct.unpack(">ii", _exactly(link, 8))
            rest = _exactly(link, size - 4)
            assert head_size >> 24 == 0, "a JSON header is answered by one"
            header = json.loads(rest[:head_size])
            answers[header["opaque"]] = header, rest[head_size:]
    return [answers[opaque] for opaque in range(len(requests))]


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


def committed(leader: str, group: str, topic: str, queue_id: int) -> int | None:
    """Return the committed offset of a group; None: there is none."""
    fields = {"consumerGroup": group, "topic": topic, "queueId": str(queue_id)}
    header, _ = ask(leader, QUERY_CONSUMER_OFFSET, fields | {"setZeroIfNotFound": "false"})
    return int(header["extFields"]["offset"]) if header["code"] == FOUND else None
