"""VIEW_BROKER_STATS_DATA (315): what topics took and groups got, for dashboards.

Spec: remoting fact sheet, sections 10 and 10.2.
"""

from __future__ import annotations

from commitlog.errors import MQError
from dledger.processors.refusal import RefusedError, refusal
from dledger.services.broker_stats import BrokerStats, Span
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.bodies import BrokerStatsData, BrokerStatsItem
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import ViewBrokerStatsDataHeader
from remoting.protocol.outcome import Condition
from remoting.seams import Clock


class BrokerStatsProcessor:
    """Answers 315; an unknown pair is code 1, as in RocketMQ."""

    def __init__(self, stats: BrokerStats, *, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return what was counted here since this node started."""
        try:
            header = ViewBrokerStatsDataHeader.decode(command.ext)
            name, key = header.stats_name, header.stats_key
            spans = self._stats.spans(name, key, self._clock.monotonic())
            if spans is None:
                raise RefusedError(Condition.BAD_REQUEST, f"The stats <{name}> <{key}> not exist")
        except MQError as error:
            return refusal(command, error)
        minute, hour, day = map(_item, spans)
        body = BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)
        return response_to(command, 0, None, None, body.encode())


def _item(span: Span) -> BrokerStatsItem:
    return BrokerStatsItem(sum=span.count, tps=round(span.per_second, 4))
