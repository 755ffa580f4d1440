"""Receipts that are renewed while a push consumer works on their messages.

A client that asks for it names no invisible time: its messages stay its own while it runs, and
come again soon after its end. It goes on to show the receipt it got first, so the newest one is
kept here. A proxy that dies forgets it: the client's acknowledgement is refused then, and the
message comes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.consumer.pop_calls import PopCalls
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ReceiptStaleError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.pop_requests import ReceiptHandle

INVISIBLE_S: Final = 60.0
"""Of each renewal, and of the grant before the first."""

RENEW_AFTER_S: Final = 30.0
"""Half of it: a renewal that fails is tried again several times before the message comes again."""

AGAIN_S: Final = 5.0
"""After a renewal that failed."""

RENEWED_S_MAX: Final = 3 * 3600.0
"""A message is not renewed for longer, as in RocketMQ: a listener that hangs must not keep it."""

RENEWALS_MAX: Final = 200_000
"""Receipts renewed at a time, about 1 KiB each; those of more messages are not, and they come
again after `INVISIBLE_S`."""

AT_ONCE_MAX: Final = 64
"""Renewals on the way to one broker group at a time: it writes many of them in one entry. One that
does not answer holds up none of another."""

LOOK_S: Final = 1.0

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Renewal:
    """One message that is out.

    Attributes:
        due_s: When it is to be renewed; infinite while that is under way.
        kept_s: Until when it is its client's without another renewal.
        lock: Held while a broker is asked about the receipt.
    """

    client_id: str
    group: str
    queue: MessageQueue
    receipt: ReceiptHandle
    due_s: float
    kept_s: float
    end_s: float
    lock: trio.Lock = field(default_factory=trio.Lock)


class RenewalTable:
    """Messages to renew, by group and the receipt that their client has. Synchronous."""

    def __init__(self) -> None:
        """Begin with none."""
        self._renewals: dict[tuple[str, str], Renewal] = {}

    def __len__(self) -> int:
        return len(self._renewals)

    def add(
        self, client_id: str, group: str, queue: MessageQueue, receipt: ReceiptHandle, now_s: float
    ) -> bool:
        """Renew a message from now on; tell whether there is space for it."""
        if len(self._renewals) >= RENEWALS_MAX:
            return False
        self._renewals[group, receipt.encode()] = Renewal(
            client_id,
            group,
            queue,
            receipt,
            due_s=now_s + RENEW_AFTER_S,
            kept_s=now_s + INVISIBLE_S,
            end_s=now_s + RENEWED_S_MAX,
        )
        return True

    def get(self, group: str, shown: str) -> Renewal | None:
        """Return what stands for the receipt that a client shows; None: it is not renewed."""
        return self._renewals.get((group, shown))

    def remove(self, group: str, shown: str) -> None:
        """Renew a message no more."""
        self._renewals.pop((group, shown), None)

    def due(self, now_s: float, is_alive: Callable[[str], bool]) -> list[tuple[str, Renewal]]:
        """Return what is to be renewed, with the receipt shown; forget what is over."""
        found: list[tuple[str, Renewal]] = []
        over: list[tuple[str, str]] = []
        for (group, shown), renewal in self._renewals.items():
            if renewal.due_s > now_s:
                continue
            if now_s < renewal.end_s and is_alive(renewal.client_id):
                found.append((shown, renewal))
            elif now_s >= renewal.kept_s:
                over.append((group, shown))
        for key in over:
            del self._renewals[key]
        return found


class Renewals:
    """Renews what stands in the table, at the brokers."""

    def __init__(self, instance: ClientInstance, is_alive: Callable[[str], bool]) -> None:
        """Prepare; *is_alive*: whether a client is there."""
        self.table = RenewalTable()
        self._instance = instance
        self._is_alive = is_alive
        self._places: dict[str, trio.CapacityLimiter] = {}

    async def run(self) -> None:
        """Renew until cancelled."""
        clock = self._instance.clock
        async with trio.open_nursery() as nursery:
            while True:
                await clock.sleep(LOOK_S)
                for shown, renewal in self.table.due(clock.monotonic(), self._is_alive):
                    renewal.due_s = math.inf
                    nursery.start_soon(self._renew, shown, renewal)

    async def _renew(self, shown: str, renewal: Renewal) -> None:
        clock = self._instance.clock
        broker_name = renewal.queue.broker_name
        places = self._places.setdefault(broker_name, trio.CapacityLimiter(AT_ONCE_MAX))
        async with places, renewal.lock:
            if self.table.get(renewal.group, shown) is not renewal:
                return  # acknowledged meanwhile
            try:
                renewal.receipt = await PopCalls(self._instance, renewal.group).change_invisible(
                    renewal.queue, renewal.receipt, INVISIBLE_S, timeout_s=AGAIN_S
                )
                renewal.due_s = clock.monotonic() + RENEW_AFTER_S
                renewal.kept_s = clock.monotonic() + INVISIBLE_S
            except ReceiptStaleError:
                self.table.remove(renewal.group, shown)
            except MQError as error:
                renewal.due_s = clock.monotonic() + AGAIN_S
                _log.info("renewal_failed", group=renewal.group, error=str(error))
