"""What a message must be to wait for a decision: the transactional part of a send.

Spec: semantics fact sheet, section 3.
"""

from __future__ import annotations

from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.refusal import RefusedError
from dledger.services.half_message import delay_of, half_properties
from dledger.state.names import MAX_GROUP_CHARS, name_problem
from remoting.protocol.headers import SendMessageHeader
from remoting.protocol.outcome import Condition

MAX_OPEN_HALVES = 100_000
"""Half messages without a decision, and what is in flight beside: they are in memory and in every
snapshot of the tables, 40 bytes each there. Producers that die leave theirs open for minutes."""


class HalfMessages:
    """Refuses what cannot become a half message."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings) -> None:
        self._group = group
        self._settings = settings

    def properties(
        self, header: SendMessageHeader, properties: bytes, topic: str, queue_id: int
    ) -> bytes:
        """Return the properties that a half message for *topic* is stored with.

        Raises:
            RefusedError: Transactional messages are not taken here, this one asks for a delay, or
                too many are open.
        """
        if self._settings.reject_transaction_message:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{self._settings.address}] sending transaction message is forbidden",
            )
        delayed_by = delay_of(properties)
        if delayed_by is not None:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"a transactional message cannot be delayed: it has {delayed_by}",
            )
        if name_problem(header.producer_group, "group", MAX_GROUP_CHARS) is not None:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"{header.producer_group[:MAX_GROUP_CHARS]!r} cannot be a producer group",
            )
        if len(self._group.state.transactions.open) >= MAX_OPEN_HALVES:
            raise RefusedError(
                Condition.BUSY,
                f"{MAX_OPEN_HALVES} transactions wait for their decision; nothing was stored",
            )
        return half_properties(properties, header.producer_group, topic, queue_id)
