"""A message as a listener gets it: with the topic it was sent to, also when it is a retry."""

from __future__ import annotations

from typing import Final

from client.core.message import MessageExt
from client.core.route import MessageQueue

RETRY_PREFIX: Final = "%RETRY%"
"""Before a group's name it makes the topic of messages the group wants once more."""

_RETRY_TOPIC: Final = b"RETRY_TOPIC"


def retry_topic_of(group: str) -> str:
    """Return the topic through which messages come back to a consumer group."""
    return RETRY_PREFIX + group


class DeliveredMessage(MessageExt):
    """A message on its way to a listener.

    Attributes:
        message_queue: Where it was pulled from; of a retry that is a queue of the retry topic.
    """

    __slots__ = ("_here", "message_queue")

    def __init__(self, message: MessageExt, queue: MessageQueue) -> None:
        """Look at the same record as *message*."""
        super().__init__(message._view, message.start, message.broker_name)
        self.message_queue = queue
        self._here = 0

    @property
    def topic(self) -> str:
        """The topic it was sent to."""
        topic = self.record.topic
        if topic.startswith(RETRY_PREFIX):
            return self._property(_RETRY_TOPIC) or topic
        return topic

    @property
    def reconsume_times(self) -> int:
        """How often it was given back for another try, here or through the retry topic."""
        return self.record.reconsume_times + self._here

    def tried_in_place(self) -> None:
        """Count one more try without a way through the broker."""
        self._here += 1
