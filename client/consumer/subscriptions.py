"""What a consumer wants of a topic: all messages, some tags, or what an SQL92 expression passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from dledger.client.core.errors import SubscriptionIllegalError
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.java_hash import tags_code
from dledger.remoting.protocol.bodies import SubscriptionData
from dledger.remoting.seams import Clock

SUB_ALL: Final = "*"
TAG: Final = "TAG"
SQL92: Final = "SQL92"

TAG_SEPARATOR: Final = "||"


@dataclass(frozen=True, slots=True)
class SubscriptionExpression:
    """An expression and its language; the default matches everything.

    Make one with `by_tag` or `by_sql`. Equal ones ask for the same.

    Attributes:
        text: As the broker gets it.
        kind: ``TAG`` or ``SQL92``.
        tags: With ``TAG``: the tags that match, or none for all messages.
    """

    text: str = SUB_ALL
    kind: str = TAG
    tags: frozenset[str] = frozenset()

    @classmethod
    def by_tag(cls, tags: str = SUB_ALL) -> Self:
        """Return one that matches messages with one of *tags*.

        Args:
            tags: ``*`` or nothing for all messages, or tags joined by ``||``.
        Raises:
            SubscriptionIllegalError: There is a separator but no tag.
        """
        if tags in ("", SUB_ALL):
            return cls()
        names = [name for part in tags.split(TAG_SEPARATOR) if (name := part.strip())]
        if not names:
            raise SubscriptionIllegalError(f"no tag in subscription expression {tags!r}")
        return cls(f" {TAG_SEPARATOR} ".join(names), TAG, frozenset(names))

    @classmethod
    def by_sql(cls, expression: str) -> Self:
        """Return one that matches messages whose properties make *expression* true.

        The broker parses it: what is wrong with it comes as the refusal of a pull, code 23.

        Raises:
            SubscriptionIllegalError: It is blank.
        """
        if not expression.strip():
            raise SubscriptionIllegalError("the SQL92 expression is blank")
        return cls(expression, SQL92)

    @property
    def is_sql(self) -> bool:
        """Whether brokers look at properties, not only at tags."""
        return self.kind == SQL92

    def admits(self, message: MessageExt) -> bool:
        """Tell whether a message that a broker found matching does match.

        Brokers compare hashes of tags, and two tags may have the same: here the tag itself counts.
        An SQL92 expression has been evaluated by the broker, which is final.
        """
        return not self.tags or message.tags in self.tags

    def subscription_data(self, topic: str, sub_version: int = 0) -> SubscriptionData:
        """Return what a heartbeat or CHECK_CLIENT_CONFIG carries of it.

        Args:
            topic: What it is an expression for.
            sub_version: Brokers keep the subscription with the greatest; RocketMQ's clients take
                the wall time in ms at which it was made.
        """
        names = sorted(self.tags)
        return SubscriptionData(
            topic=topic,
            sub_string=self.text,
            tags_set=names,
            code_set=[tags_code(name) for name in names],
            sub_version=sub_version,
            expression_type=self.kind,
        )


class Subscriptions:
    """Topic → what is wanted of it. A change has a version above all before it."""

    def __init__(self, clock: Clock) -> None:
        """Begin with none; versions are dates, as in RocketMQ's clients."""
        self._clock = clock
        self._wanted: dict[str, tuple[SubscriptionExpression, int]] = {}
        self._newest = 0

    def __iter__(self) -> Iterator[str]:
        """Yield the topics."""
        return iter(list(self._wanted))

    def __len__(self) -> int:
        return len(self._wanted)

    def get(self, topic: str) -> SubscriptionExpression | None:
        """Return what is wanted of *topic*; None: nothing."""
        found = self._wanted.get(topic)
        return None if found is None else found[0]

    def put(self, topic: str, expression: str | SubscriptionExpression = SUB_ALL) -> None:
        """Want *expression* of *topic* from now on.

        Raises SubscriptionIllegalError: a text that is no expression over tags.
        """
        if isinstance(expression, str):
            expression = SubscriptionExpression.by_tag(expression)
        self._newest = max(self._clock.wall_ms(), self._newest + 1)
        self._wanted[topic] = (expression, self._newest)

    def remove(self, topic: str) -> bool:
        """Want nothing of *topic*; return whether something was wanted."""
        return self._wanted.pop(topic, None) is not None

    def data(self) -> list[SubscriptionData]:
        """Return what a heartbeat carries of them."""
        return [
            expression.subscription_data(topic, version)
            for topic, (expression, version) in self._wanted.items()
        ]
