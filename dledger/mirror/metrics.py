"""What a mirror shows on its page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from dledger.mirror.mirror import Mirror, Round
from dledger.remoting.metrics import Family, Sample, family_text


class MirrorMetrics:
    """The page of one mirror. Give `note` each round."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._copied_messages = 0
        self._commits = 0
        self._failed_rounds = 0

    def note(self, done: Round) -> None:
        """Count a round."""
        self._copied_messages += done.copied_messages
        self._commits += done.commits
        self._failed_rounds += bool(done.errors)

    def pieces(self) -> Iterator[str]:
        """Yield the page."""
        for family, samples in self._families():
            yield from family_text(family, samples, {})

    def _families(self) -> Iterator[tuple[Family, Iterable[Sample]]]:
        yield (
            Family(
                "dledger_mirror_lag_messages",
                "gauge",
                "Messages of the source that the target does not have, stopped queues included.",
            ),
            self._lags(),
        )
        yield (
            Family(
                "dledger_mirror_queues_stopped",
                "gauge",
                "Queues to which nothing is copied; the log has the reason.",
            ),
            [({}, len(self._mirror.stopped))],
        )
        for name, about, value in (
            ("copied_messages", "Messages stored at the target.", self._copied_messages),
            ("commits", "Consumer offsets committed at the target.", self._commits),
            ("rounds", "Rounds over all queues that have ended.", self._mirror.rounds),
            ("failed_rounds", "Rounds in which a cluster refused something.", self._failed_rounds),
        ):
            yield Family(f"dledger_mirror_{name}_total", "counter", about), [({}, value)]

    def _lags(self) -> Iterator[Sample]:
        ordered = sorted(self._mirror.queues.items(), key=lambda item: item[0].topic)
        for topic, queues in groupby(ordered, key=lambda item: item[0].topic):
            yield {"topic": topic}, sum(copy.lag for _, copy in queues)
