"""Offsets that nobody keeps: every start begins anew."""

from __future__ import annotations

from collections.abc import Mapping

from client.core.route import MessageQueue


class UnkeptOffsets:
    """An `client.consumer.offset_store.OffsetStore` that knows nothing and forgets at once."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return None: nothing is known of any queue."""
        return None

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """Say that all is well; the offsets are where the consumer is, and nowhere else."""
        return set(offsets)
