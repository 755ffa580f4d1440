"""Messages that try the services of a broker: properties that are the broker's own, or too much.

Each workload may send some of its messages like this (`Workload.hostile_per_mille`). What is drawn
comes from a stream of its own, so that a plan without them is the run it always was. The checkers
judge these messages like all others: stored once acknowledged, delivered once, nothing lost; and a
world notices when a node ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitlog.reserved_properties import MAX_CLIENT_PROPERTIES_BYTES, OWNED_NAMES
from jepsen_like.seeded_rng import SimRng, rng_stream

VALUES: Final = (
    "abc",
    "-1",
    "0",
    "9" * 30,
    "9" * 5000,
    "RMQ_SYS_DLEDGER_STATE",
    "SCHEDULE_TOPIC_XXXX",
    "../orders",
    "%RETRY%",
    "\u00e9\u4e16\U0001f600",
    "\x00\x03\x7f",
    " ",
)
"""Of a property: no numbers, no topics, no text, and some of them are."""

OTHER_NAMES: Final = (
    "RETRY_TOPIC",
    "ORIGIN_MESSAGE_ID",
    "DLQ_ORIGIN_TOPIC",
    "RECONSUME_TIME",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    "PUSH_REPLY_TIME",
    "CLUSTER",
    "WAIT",
    "PGROUP",
    "\x7f\u200b",
)
"""Names that clients write as well, with values no client would."""

SPARE_BYTES: Final = 600
"""Of the longest properties: what the SDK and a workload write themselves."""


class HostileMessages:
    """Draws properties; the same ones for the same seed and number of calls."""

    def __init__(self, seed: int, per_mille: int) -> None:
        self._rng: SimRng = rng_stream(seed, "hostile")
        self._per_mille = per_mille

    def properties(self) -> dict[str, str]:
        """Return the properties of the next message; most often none."""
        if not self._per_mille or self._rng.randrange(1000) >= self._per_mille:
            return {}
        draw: Callable[[], dict[str, str]] = self._rng.choice((self._owned, self._odd, self._long))
        return draw()

    def _owned(self) -> dict[str, str]:
        names = OWNED_NAMES if self._rng.random() < 0.5 else (self._rng.choice(OWNED_NAMES),)
        return {name: self._rng.choice(VALUES) for name in names}

    def _odd(self) -> dict[str, str]:
        return {name: self._rng.choice(VALUES) for name in OTHER_NAMES if self._rng.random() < 0.4}

    def _long(self) -> dict[str, str]:
        most = MAX_CLIENT_PROPERTIES_BYTES - SPARE_BYTES
        size = self._rng.choice((most, most, self._rng.randint(1, most)))
        fill, bytes_each = self._rng.choice((("x", 1), ("\u4e16", 3)))
        return {"F": fill * (size // bytes_each)}
