"""Decides from what clients recorded and from the logs whether the cluster kept its promises.

Pure: rows in, verdict out. The demo feeds it a live run, ``dledger demo --check`` a kept one.

Every body is a function of the message's key, so that a changed body is noticed, and every key is
sent under one call only, so that a key found twice is a duplicate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

KEY_END = b" "


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """One call of send: when it began and ended (microseconds) and how.

    ``outcome`` is ``stored``, ``not_stored`` or ``unknown``; place counts for ``stored`` only.
    """

    key: str
    began_us: int
    ended_us: int
    outcome: str
    queue_id: int = -1
    queue_offset: int = -1


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A message at a place: as a consumer got it or as it stands in a log."""

    queue_id: int
    queue_offset: int
    key: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a run showed. Numbers of messages, but for the times and the answers."""

    acknowledged: int
    lost: int
    """Acknowledged and not found where a consumer or a replica's log must have it."""
    misplaced: int
    """Acknowledged at one place and found at another only."""
    duplicated: int
    """Keys found more than once; a retry of a send whose outcome was unknown."""
    reordered: int
    """Stored behind a message that was sent only after its own acknowledgement."""
    resurrected: int
    """Told *not stored* and found all the same."""
    changed: int
    """Places at which two reads found different messages, or a body that is not its key's."""
    gaps: int
    """Offsets missing between the first and the last of a queue."""
    not_stored: int
    unknown: int
    delivered: int
    failover_ms: float | None
    """From the kill to the next acknowledgement of a send begun after it; None without one."""
    replicas_equal: bool
    lost_keys: tuple[str, ...] = ()
    """The first few, for the one who looks into it."""

    @property
    def kept(self) -> bool:
        """Nothing acknowledged is missing or altered, and the replicas agree."""
        return (
            not (
                self.lost
                or self.misplaced
                or self.reordered
                or self.resurrected
                or self.changed
                or self.gaps
            )
            and self.replicas_equal
        )


LOST_KEYS_SHOWN = 10


def body_of(key: str, size: int) -> bytes:
    """Return the body of the message *key*: the key, a blank, and filler up to *size* bytes."""
    head = key.encode() + KEY_END
    filler = (head * (size // len(head) + 1))[len(head) :]
    return (head + filler)[: max(size, len(head))]


def key_in(body: bytes) -> str | None:
    """Return the key of a body; None when the body is not one that `body_of` makes."""
    head, blank, _ = body.partition(KEY_END)
    try:
        key = head.decode("ascii")
    except UnicodeDecodeError:
        return None
    return key if blank and body_of(key, len(body)) == body else None


def check(
    sent: Sequence[Sent],
    delivered: Iterable[Found],
    *,
    seen_earlier: Iterable[Found] = (),
    logs: Mapping[str, Sequence[Found]] | None = None,
    kills_us: Sequence[int] = (),
    replicas_equal: bool = True,
) -> Verdict:
    """Return the verdict over one run.

    Args:
        sent: Every send that was called.
        delivered: What one full read of all queues gave at the end, each place once. A key of
            ``""`` is a body that is not what was sent.
        seen_earlier: What consumers got while the run went on.
        logs: Node to what its log holds; an acknowledged message must stand in each.
        kills_us: When a leader was killed, on the clock of *sent*.
    """
    places: dict[tuple[int, int], str] = {}
    changed: set[tuple[int, int]] = set()
    for found in delivered:
        _place(found, places, changed)
    for found in seen_earlier:
        _place(found, places, changed, only_compare=True)
    by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, key in places.items():
        by_key[key].append(place)

    stored = [row for row in sent if row.outcome == "stored"]
    missing = {row.key for row in stored if row.key not in by_key}
    for found_in_log in (logs or {}).values():
        keys = {found.key for found in found_in_log}
        missing |= {row.key for row in stored if row.key not in keys}
        for found in found_in_log:
            _place(found, places, changed, only_compare=True)
    misplaced = sum(
        1
        for row in stored
        if row.key not in missing
        and row.queue_offset >= 0
        and places.get((row.queue_id, row.queue_offset)) != row.key
    )
    outcomes = Counter(row.outcome for row in sent)
    return Verdict(
        acknowledged=len(stored),
        lost=len(missing),
        misplaced=misplaced,
        duplicated=sum(1 for key, at in by_key.items() if key and len(at) > 1),
        reordered=_reordered(stored),
        resurrected=sum(1 for row in sent if row.outcome == "not_stored" and row.key in by_key),
        changed=len(changed),
        gaps=_gaps(places),
        not_stored=outcomes["not_stored"],
        unknown=outcomes["unknown"],
        delivered=len(places),
        failover_ms=_failover_ms(stored, kills_us),
        replicas_equal=replicas_equal,
        lost_keys=tuple(sorted(missing)[:LOST_KEYS_SHOWN]),
    )


def _place(
    found: Found,
    places: dict[tuple[int, int], str],
    changed: set[tuple[int, int]],
    *,
    only_compare: bool = False,
) -> None:
    place = (found.queue_id, found.queue_offset)
    before = places.get(place)
    if before is None and not only_compare:
        places[place] = found.key
    if not found.key or (before != found.key and (before is not None or only_compare)):
        changed.add(place)


def _reordered(stored: Sequence[Sent]) -> int:
    """Count messages acknowledged before one with a lower offset was even sent."""
    queues: dict[int, list[Sent]] = defaultdict(list)
    for row in stored:
        if row.queue_offset >= 0:
            queues[row.queue_id].append(row)
    count = 0
    for rows in queues.values():
        latest_begin = 0
        for row in sorted(rows, key=lambda row: row.queue_offset):
            count += row.ended_us < latest_begin
            latest_begin = max(latest_begin, row.began_us)
    return count


def _gaps(places: Iterable[tuple[int, int]]) -> int:
    offsets: dict[int, list[int]] = defaultdict(list)
    for queue_id, offset in places:
        offsets[queue_id].append(offset)
    return sum(max(found) + 1 - min(found) - len(found) for found in offsets.values())


def _failover_ms(stored: Sequence[Sent], kills_us: Sequence[int]) -> float | None:
    """Return the longest time from a kill to the next acknowledgement; inf when none came."""
    if not kills_us:
        return None
    times: list[float] = []
    for kill in kills_us:
        after = [row.ended_us for row in stored if row.began_us >= kill]
        times.append((min(after) - kill) / 1000 if after else float("inf"))
    return max(times)
