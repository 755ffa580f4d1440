"""Requests that acknowledge many messages: receipts are put into items, and items into requests.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dledger.client.core.route import MessageQueue
from dledger.remoting.protocol.pop_requests import (
    MAX_BITS,
    MAX_REQUEST_BITS,
    BatchAck,
    ReceiptHandle,
)

ACK_MESSAGES_MAX: Final = 4_096
"""Messages that one request acknowledges: brokers refuse more."""

Received = tuple[MessageQueue, ReceiptHandle]
"""Where a message stands, and what it is acknowledged with."""


class AckRequest(NamedTuple):
    """What one request acknowledges.

    *places*: which of all receipts each message is, in the order in which a broker counts them:
    item by item, in each the lowest offset first.
    """

    items: list[BatchAck]
    places: list[int]


def ack_requests(group: str, receipts: Sequence[Received]) -> Iterator[AckRequest]:
    """Yield one request after the other for messages of one broker group. Pure."""
    for first in range(0, len(receipts), ACK_MESSAGES_MAX):
        request, bits = AckRequest([], []), 0
        for item, places in _items(group, receipts, first):
            if request.items and bits + item.bits > MAX_REQUEST_BITS:
                yield request
                request, bits = AckRequest([], []), 0
            request.items.append(item)
            request.places.extend(places)
            bits += item.bits
        yield request


def _items(
    group: str, receipts: Sequence[Received], first: int
) -> Iterator[tuple[BatchAck, list[int]]]:
    """Yield the items of the receipts from the *first* on, each with their places."""
    grants: dict[tuple[str, int, int, int, int, int], dict[int, int]] = {}
    for place, (queue, receipt) in enumerate(receipts[first : first + ACK_MESSAGES_MAX], first):
        # With a filter the messages of one grant may stand far apart: one item spans few of them.
        distance = receipt.offset - receipt.start_offset
        key = (
            queue.topic,
            receipt.queue_id,
            receipt.revive_queue_id,
            receipt.pop_time_ms,
            # An item does not name it: receipts that differ in it alone are items of their own.
            receipt.invisible_ms,
            receipt.start_offset + distance - distance % MAX_BITS,
        )
        grants.setdefault(key, {})[receipt.offset] = place
    for (topic, queue_id, revive, popped, _, start), offsets in grants.items():
        item = BatchAck(
            c=group,
            t=topic,
            so=start,
            q=queue_id,
            rq=revive,
            pt=popped,
            b=BatchAck.encode_offsets(start, offsets),
        )
        yield item, [offsets[offset] for offset in sorted(offsets)]
