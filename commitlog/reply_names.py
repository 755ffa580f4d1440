"""Names of RocketMQ's request and reply, for brokers and clients alike.

Spec: docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

from typing import Final

REPLY_MESSAGE_FLAG: Final = "reply"
"""Value of the property MSG_TYPE on a reply."""

REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"


def reply_topic(cluster: str) -> str:
    """Return the topic that replies within *cluster* go by."""
    return cluster + REPLY_TOPIC_SUFFIX
