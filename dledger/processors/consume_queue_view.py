"""QUERY_CONSUME_QUEUE (321): the units of a queue, and whether a group's filter lets them pass.

Spec: remoting fact sheet, section 9.
"""

from __future__ import annotations

from typing import Final

from commitlog.errors import MQError
from commitlog.record import record_properties
from dledger.group_api import BrokerGroup
from dledger.processors.client_table import ClientTable, Subscription
from dledger.processors.get_message import MessageRange, read_units
from dledger.processors.property_filters import PropertyFilters
from dledger.processors.refusal import RefusedError, not_leader, refusal
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import QueryConsumeQueueHeader
from remoting.protocol.outcome import Condition

MAX_UNITS: Final = 500
"""Units shown in one answer; a tool asks again for more."""


class ConsumeQueueViewProcessor:
    """Answers 321, on the leader."""

    def __init__(
        self, group: BrokerGroup, clients: ClientTable[Connection], filters: PropertyFilters
    ) -> None:
        self._group = group
        self._clients = clients
        self._filters = filters

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return units from an offset on."""
        try:
            body = self._view(QueryConsumeQueueHeader.decode(command.ext))
        except MQError as error:
            return refusal(command, error)
        return response_to(command, 0, None, None, body.encode())

    def _view(self, header: QueryConsumeQueueHeader) -> QueryConsumeQueueResponseBody:
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        bounds = group.state.queues.get((header.topic, header.queue_id))
        if bounds is None:
            raise RefusedError(
                Condition.BAD_REQUEST, f"{header.queue_id}@{header.topic} is not exist!"
            )
        subscription = self._subscription(header)
        body = QueryConsumeQueueResponseBody(
            subscription_data=subscription.data if subscription is not None else None,
            min_queue_index=bounds.min_offset,
            max_queue_index=bounds.max_offset,
        )
        if subscription is not None and not subscription.is_tag_type:
            body.filter_data = subscription.data.sub_string
        first = max(header.index, bounds.min_offset)
        found = read_units(
            group, header.topic, header.queue_id, first, max(0, min(header.count, MAX_UNITS))
        )
        if isinstance(found, MessageRange):
            return body
        for position, size, code in found.units.tolist():
            shown = ConsumeQueueData(physic_offset=position, physic_size=size, tags_code=code)
            if subscription is not None:
                self._judge(shown, subscription)
            body.queue_data.append(shown)
        return body

    def _subscription(self, header: QueryConsumeQueueHeader) -> Subscription | None:
        if not header.consumer_group:
            return None
        consumers = self._clients.consumer_group(header.consumer_group)
        return None if consumers is None else consumers.subscriptions.get(header.topic)

    def _judge(self, shown: ConsumeQueueData, subscription: Subscription) -> None:
        if subscription.is_tag_type:
            codes = subscription.codes
            shown.eval = codes is None or bool((codes == shown.tags_code).any())
            return
        try:
            expression = self._filters.of_subscription(subscription)
            record = self._group.log.read(shown.physic_offset, shown.physic_size)
            shown.eval = expression.matches(record_properties(record))
        except MQError as error:
            shown.eval, shown.msg = False, str(error)
