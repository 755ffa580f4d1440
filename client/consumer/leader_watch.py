"""Sends readers to a new leader as soon as anybody in this client has heard of it.

A broker that dies without a word still owes answers to pulls it held, and nobody notices before
their time is over. Other requests find its successor earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from client.consumer.owned_queue import OwnedQueue
from client.core.client_instance import ClientInstance

LOOK_PERIOD_S: Final = 1.0
"""A look costs nothing: it compares what this client knows."""


class LeaderWatch:
    """Looks after the readers of one consumer."""

    def __init__(self, instance: ClientInstance, owned: Iterable[OwnedQueue]) -> None:
        """Watch over *owned*, whatever that is at the time."""
        self._instance = instance
        self._owned = owned
        self._led_by: dict[str, str] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._instance.clock.sleep(LOOK_PERIOD_S)
            self.look()

    def look(self) -> None:
        """Interrupt the pulls at brokers that another one has taken over from."""
        owned = list(self._owned)
        moved = set()
        for broker_name in {item.queue.broker_name for item in owned}:
            address = self._instance.leaders.address(broker_name)
            if address is None:
                continue
            if self._led_by.get(broker_name, address) != address:
                moved.add(broker_name)
            self._led_by[broker_name] = address
        for item in owned:
            if item.queue.broker_name in moved:
                item.interrupt()
