"""A request that gives up messages is refused, with what would go, until it is confirmed.

The refusal carries what would go in a field; the same request with `CONFIRMED_FIELD` does it.
RocketMQ's tools know neither: the remark names the command that does.
"""

from __future__ import annotations

from typing import Final

import msgspec

CONFIRMED_FIELD: Final = "dledgerConfirmed"
"""Of a request; `true`: what it gives up has been shown and is agreed to."""

GIVES_UP_FIELD: Final = "dledgerGivesUp"
"""Of a refusal: `GivenUp` as JSON."""

TOPICS_SHOWN: Final = 50
"""Topics named in it, those with most messages: a header field is no report."""


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """What would be given up now, on every replica.

    Attributes:
        change: The setting and its values before and after, for people.
        segments: Files of the log; 0 where queues of a topic only begin later.
        size_bytes: Of the log.
        newest_ms: Store time of the newest message that goes; 0: none goes.
        messages: By topic, at most `TOPICS_SHOWN` of them.
        other_topics: Topics with messages that go beside those.
        other_messages: Their messages.
        uncounted_queues: Queues that were not read, because there are too many.
    """

    change: str
    segments: int = 0
    size_bytes: int = 0
    newest_ms: int = 0
    messages: dict[str, int] = {}
    other_topics: int = 0
    other_messages: int = 0
    uncounted_queues: int = 0

    @property
    def total(self) -> int:
        """Messages that go, as far as they were counted."""
        return sum(self.messages.values()) + self.other_messages

    def encode(self) -> str:
        """Return it as it stands in the field."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        """Return it in one sentence."""
        at_least = "at least " if self.uncounted_queues else ""
        return (
            f"{self.change} gives up {at_least}{self.total} messages that are kept now"
            f" ({self.segments} segments, {self.size_bytes} bytes), and others sooner than agreed"
        )


def decode_given_up(text: str) -> GivenUp:
    """Return what would be removed, as a refusal lists it.

    Raises:
        msgspec.MsgspecError: It is no such text.
    """
    return msgspec.json.decode(text, type=GivenUp)


def given_up(
    change: str, messages: dict[str, int], *, uncounted_queues: int = 0, **size: int
) -> GivenUp:
    """Return it with the largest topics named and the others summed up. Pure."""
    largest = sorted(messages.items(), key=lambda item: (-item[1], item[0]))
    named, others = largest[:TOPICS_SHOWN], largest[TOPICS_SHOWN:]
    return GivenUp(
        change=change,
        messages=dict(named),
        other_topics=len(others),
        other_messages=sum(count for _, count in others),
        uncounted_queues=uncounted_queues,
        **size,
    )
