"""Which SQL92 expression judges a pull: the request's own, the group's, or those of its retries.

Expressions are compiled when a pull first uses them, not when a heartbeat brings them: so what a
client can make a broker do with one request stays small.

Spec: docs/internals/protocol/semantics.md, section 7; docs/internals/protocol/remoting.md, section
    8.1.
"""

from __future__ import annotations

from typing import Final

from dledger.broker_settings import BrokerSettings
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.property_filter import Expression, ExpressionCache, PropertyFilter, RetryFilter
from dledger.processors.answers import RefusedError
from dledger.processors.client_table import ConsumerGroup, Subscription
from dledger.state.names import RETRY_PREFIX
from remoting.connection import Connection
from remoting.protocol.outcome import Condition

SQL92: Final = "SQL92"

MAX_RETRY_EXPRESSIONS: Final = 32
"""Topics of one group whose retries are matched again; those of further ones pass as they did."""


class PropertyFilters:
    """Finds and compiles expressions."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._cache = ExpressionCache()

    def expression(self, kind: str | None, text: str | None) -> Expression:
        """Return the expression that a client names.

        Args:
            kind: Its language, which is not ``TAG``.
        Raises:
            RefusedError: Another language than SQL92, or filtering by properties is switched off;
                or, with code 23, *text* is no expression.
        """
        if kind != SQL92 or not self._settings.broker.enable_property_filter:
            raise RefusedError(
                Condition.BAD_REQUEST,
                f"The broker does not support consumer to filter message by {kind}",
            )
        try:
            return self._cache.get(text or "")
        except ExpressionIllegalError as error:
            raise RefusedError(
                Condition.SUBSCRIPTION_ILLEGAL,
                f"parse the consumer's subscription failed: {error}",
            ) from error

    def of_subscription(self, subscription: Subscription) -> Expression:
        """Return the expression of a heartbeat's subscription; raises as `expression`."""
        return self.expression(subscription.data.expression_type, subscription.data.sub_string)

    def of_retries(self, group: ConsumerGroup[Connection], topic: str) -> PropertyFilter | None:
        """Return what judges messages of *topic* if that is the group's retry topic.

        Returns:
            None where retries are not judged: no retry topic, or no topic is subscribed by SQL92.
        """
        settings = self._settings
        if not topic.startswith(RETRY_PREFIX):
            return None
        if not (settings.broker.enable_property_filter and settings.broker.filter_support_retry):
            return None
        expressions: dict[str, Expression] = {}
        for name, subscription in group.subscriptions.items():
            if subscription.is_tag_type or len(expressions) == MAX_RETRY_EXPRESSIONS:
                continue
            try:
                expressions[name] = self.of_subscription(subscription)
            except RefusedError:
                continue  # no pull of that topic can use it, so nothing of it was judged before
        return RetryFilter(expressions) if expressions else None
