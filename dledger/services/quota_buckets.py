"""Which requests fit a quota, and how long those wait that come too early; pure.

Of each limit a bucket has one time: when all that passed has had its share of the rate. A request
moves that time on by its cost over the rate, beginning from no further back than `BURST_S`: what a
client did not use for longer is lost. So in any time t there passes at most
rate * (t + `BURST_S` + the longest wait), and one request beside it that alone is larger.

A client below its rate never waits. The time of now is the caller's, in seconds of a clock that
does not go back. What passed under another quota is not waited for.

Spec: docs/internals/decisions/0027-quotas.md.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dledger.state.quotas import QuotaConfig

BURST_S: Final = 1.0
"""A client may use a quota of so long at once: clients send in bursts, and a rate is per second."""

SEND_DELAY_MAX_S: Final = 1.0
"""An answer to a send waits no longer than this: RocketMQ's clients wait 3 seconds for it."""

RECEIVE_DELAY_MAX_S: Final = 2.0
"""A pull is held no longer than this: pull consumers of RocketMQ wait 10 seconds for an answer."""

BUCKETS_MAX: Final = 10_000
"""Accounts and clients that are counted, some 300 bytes each. Client ids are the clients' to
choose; the bucket that was used longest ago is forgotten for a new one, which begins full."""

NAMES_COUNTED_MAX: Final = 500
"""Accounts and clients with figures of their own on the page for Prometheus. Later ones are
counted together, under an empty name."""

SENT: Final = slice(0, 2)
RECEIVED: Final = slice(2, 4)


class Cost(NamedTuple):
    """What a request is counted as."""

    messages: int
    size_bytes: int


class Verdict(NamedTuple):
    """What becomes of a request.

    Attributes:
        passes: Whether it is done; else it is refused.
        delay_s: How long it, or its answer, waits.
        retry_after_s: Of a refused one: how long after that answer it would pass, if nothing else
            comes in between.
    """

    passes: bool
    delay_s: float = 0.0
    retry_after_s: float = 0.0


PASSES: Final = Verdict(True)


@dataclass(slots=True)
class Figures:
    """What became of the requests of one account or client since the start."""

    throttled_s: float = 0.0
    refused: int = 0


@dataclass(slots=True)
class _Bucket:
    quota: QuotaConfig
    # Sent messages, sent bytes, received messages, received bytes.
    clear_at_s: list[float] = field(default_factory=lambda: [-math.inf] * 4)


class QuotaBuckets:
    """The buckets of one broker, by the key of an account or client.

    Attributes:
        figures: What was held and refused; under the empty key what has none of its own.
    """

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets_max = buckets_max
        # What was used longest ago stands first.
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.figures: dict[str, Figures] = {}
        self._connections: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def connections(self) -> Mapping[str, int]:
        """Connections that are counted, by key."""
        return self._connections

    # ------------------------------------------------------------------------------ rates

    def send(self, key: str, quota: QuotaConfig, cost: Cost, now_s: float) -> Verdict:
        """Decide on a send, and count it where it passes."""
        rates = (quota.sent_messages_per_s, quota.sent_bytes_per_s)
        if rates == (None, None):
            return PASSES
        bucket = self._bucket(key, quota, now_s)
        times = bucket.clear_at_s[SENT]
        clear_at_s = [
            at_s if rate is None else max(at_s, now_s - BURST_S) + amount / rate
            for at_s, rate, amount in zip(times, rates, cost, strict=True)
        ]
        delay_s = _longest(clear_at_s, rates, now_s)
        # What is larger than all that may pass at once passes where nothing did for a while: else
        # it never would.
        full_in_s = _longest(times, rates, now_s) + BURST_S
        if delay_s > SEND_DELAY_MAX_S and full_in_s > 0:
            passes_in_s = min(delay_s - SEND_DELAY_MAX_S, full_in_s)
            return self._refused(key, SEND_DELAY_MAX_S, passes_in_s)
        bucket.clear_at_s[SENT] = clear_at_s
        return self._passes(key, min(delay_s, SEND_DELAY_MAX_S))

    def receive(self, key: str, quota: QuotaConfig, now_s: float) -> Verdict:
        """Decide on a request for messages: by what was given before; see `received`."""
        rates = (quota.received_messages_per_s, quota.received_bytes_per_s)
        if rates == (None, None):
            return PASSES
        times = self._bucket(key, quota, now_s).clear_at_s[RECEIVED]
        delay_s = _longest(times, rates, now_s)
        if delay_s > RECEIVE_DELAY_MAX_S:
            return self._refused(key, RECEIVE_DELAY_MAX_S, delay_s - RECEIVE_DELAY_MAX_S)
        return self._passes(key, delay_s)

    def received(self, key: str, quota: QuotaConfig, cost: Cost, now_s: float) -> None:
        """Count what a request was answered with."""
        rates = (quota.received_messages_per_s, quota.received_bytes_per_s)
        bucket = self._bucket(key, quota, now_s)
        bucket.clear_at_s[RECEIVED] = [
            at_s if rate is None else max(at_s, now_s - BURST_S) + amount / rate
            for at_s, rate, amount in zip(bucket.clear_at_s[RECEIVED], rates, cost, strict=True)
        ]

    def _bucket(self, key: str, quota: QuotaConfig, now_s: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._buckets_max:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = _Bucket(quota)
            return bucket
        self._buckets.move_to_end(key)
        if bucket.quota is not quota:
            if bucket.quota != quota:
                # What passed under a lower rate would keep its client waiting for that rate's time.
                bucket.clear_at_s = [min(at_s, now_s) for at_s in bucket.clear_at_s]
            bucket.quota = quota
        return bucket

    def _passes(self, key: str, delay_s: float) -> Verdict:
        if delay_s <= 0:
            return PASSES
        self._figures(key).throttled_s += delay_s
        return Verdict(True, delay_s)

    def _refused(self, key: str, held_s: float, passes_in_s: float) -> Verdict:
        figures = self._figures(key)
        figures.refused += 1
        figures.throttled_s += held_s
        return Verdict(False, held_s, max(0.0, passes_in_s - held_s))

    # ------------------------------------------------------------------------------ connections

    def connect(self, key: str, quota: QuotaConfig) -> bool:
        """Count a connection; False, and not counted, where there are as many as may be."""
        count = self._connections.get(key, 0)
        if quota.connections is not None and count >= quota.connections:
            self._figures(key).refused += 1
            return False
        self._connections[key] = count + 1
        return True

    def disconnect(self, key: str) -> None:
        """Count a connection no more."""
        count = self._connections.pop(key)
        if count > 1:
            self._connections[key] = count - 1

    # ------------------------------------------------------------------------------ figures

    def _figures(self, key: str) -> Figures:
        figures = self.figures.get(key)
        if figures is None:
            if len(self.figures) >= NAMES_COUNTED_MAX:
                key = ""
            figures = self.figures.setdefault(key, Figures())
        return figures


def _longest(times: list[float], rates: tuple[int | None, int | None], now_s: float) -> float:
    """Return how far behind now the latest of *times* is; negative: before it."""
    return max(at_s - now_s for at_s, rate in zip(times, rates, strict=True) if rate is not None)
