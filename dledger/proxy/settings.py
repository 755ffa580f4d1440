"""What a client is asked to do: its settings, completed by what brokers and the proxy know. Pure.

Retries of a group follow its policy; a group without one has the delays that RocketMQ's proxy
states, the first after 1 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from typing_extensions import TypeIs

from dledger.client.core.message import MAX_BODY_BYTES
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.messages import duration, full_name
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig

SEND_ATTEMPTS: Final = 3
SEND_PAUSE_MS: Final = 10
SEND_PAUSE_MS_MAX: Final = 1_000
SEND_PAUSE_FACTOR: Final = 2.0

RECEIVE_BATCH_SIZE: Final = 32
LONG_POLLING_MS: Final = 20_000

RETRY_DELAYS_MS: Final = tuple(
    1000 * seconds for seconds in (1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)
)

ATTEMPTS_MAX: Final = (1 << 31) - 1
"""As many as the protocol can state: a group may try without end."""

DELAY_MS_MAX: Final = 12 * 3_600_000
"""Of a policy, which brokers keep as an administrator wrote it: no broker lets a message wait for
longer, and much longer ones are none that the protocol can state."""

CONSUMERS: Final = frozenset({pb.PUSH_CONSUMER, pb.SIMPLE_CONSUMER, pb.PULL_CONSUMER})
LITE_CONSUMERS: Final = frozenset({pb.LITE_PUSH_CONSUMER, pb.LITE_SIMPLE_CONSUMER})


def for_producer(asked: pb.Settings) -> pb.Settings:
    """Return the settings of a producer."""
    settings = pb.Settings()
    settings.CopyFrom(asked)
    settings.backoff_policy.CopyFrom(
        pb.RetryPolicy(
            max_attempts=SEND_ATTEMPTS,
            exponential_backoff=pb.ExponentialBackoff(
                initial=duration(SEND_PAUSE_MS),
                max=duration(SEND_PAUSE_MS_MAX),
                multiplier=SEND_PAUSE_FACTOR,
            ),
        )
    )
    settings.publishing.max_body_size = MAX_BODY_BYTES
    settings.publishing.validate_message_type = True
    settings.metric.on = False
    return settings


def for_consumer(asked: pb.Settings, group: SubscriptionGroupConfig) -> pb.Settings:
    """Return the settings of a consumer of *group*."""
    settings = pb.Settings()
    settings.CopyFrom(asked)
    settings.backoff_policy.CopyFrom(retry_policy(group))
    subscription = settings.subscription
    subscription.fifo = group.consume_message_orderly
    subscription.receive_batch_size = RECEIVE_BATCH_SIZE
    if not subscription.HasField("long_polling_timeout"):
        subscription.long_polling_timeout.CopyFrom(duration(LONG_POLLING_MS))
    settings.metric.on = False
    return settings


def retry_policy(group: SubscriptionGroupConfig) -> pb.RetryPolicy:
    """Return when messages of *group* are to be tried again."""
    policy = group.group_retry_policy
    attempts = min(max(0, group.retry_max_times) + 1, ATTEMPTS_MAX)
    exponential = policy.exponential_retry_policy or {}
    if policy.type.upper() == "EXPONENTIAL":
        return pb.RetryPolicy(
            max_attempts=attempts,
            exponential_backoff=pb.ExponentialBackoff(
                initial=duration(_number(exponential, "initial", 5_000)),
                max=duration(_number(exponential, "max", 7_200_000)),
                multiplier=_number(exponential, "multiplier", 2),
            ),
        )
    delays = (policy.customized_retry_policy or {}).get("next")
    if not (isinstance(delays, list) and delays and all(map(_is_number, delays))):
        delays = list(RETRY_DELAYS_MS)
    return pb.RetryPolicy(
        max_attempts=attempts,
        customized_backoff=pb.CustomizedBackoff(
            next=[duration(min(ms, DELAY_MS_MAX)) for ms in delays]
        ),
    )


def _number(table: Mapping[str, Any], name: str, default: int) -> int:
    value = table.get(name)
    return min(value, DELAY_MS_MAX) if _is_number(value) else default


def _is_number(value: object) -> TypeIs[int]:
    return type(value) is int and value > 0


def topics_of(settings: pb.Settings) -> frozenset[str]:
    """Return the topics a producer with *settings* sends to."""
    return frozenset(full_name(topic) for topic in settings.publishing.topics)


def namespace_of(settings: pb.Settings) -> str:
    """Return the namespace that a client with *settings* has; empty: none."""
    named = [*settings.publishing.topics, settings.subscription.group]
    return next((each.resource_namespace for each in named if each.resource_namespace), "")


def group_of(settings: pb.Settings) -> str:
    """Return the group of a consumer with *settings*; empty for a producer."""
    return full_name(settings.subscription.group)
