"""From which member a consumer reads next.

The leader serves readers of recent messages. A reader that is further behind than what is taken to
be in memory would make the leader read its disk: it is sent to a follower that is alive and has
almost everything, RocketMQ's `whichBrokerWhenConsumeSlowly` first. A follower keeps such a reader
and sends it back to the leader when it has caught up.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger.commitlog.entry import parse_header
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup
from dledger.remoting.seams import Clock
from dledger.settings.text import LEADER_ID, number_in
from dledger.state.topics import SubscriptionGroupConfig

ALIVE_MS: Final = 2_000
"""A follower that has confirmed nothing for so long is not recommended: longer than an election."""

CAUGHT_UP_BYTES: Final = 16 << 20
"""How far a follower may be behind and still be recommended: more than is on its way under load,
less than a reader gets through in a second."""

FOLLOWERS_AGE_S: Final = 1.0
"""How old what is known of the followers may be: slow readers pull hundreds of times a second."""


@dataclass(eq=False, repr=False)
class ReadSuggestion:
    """Answers the `suggestWhichBrokerId` of pulls."""

    _group: BrokerGroup
    own_id: int
    follower_ids: Mapping[str, int]
    recent_bytes: int
    slave_read_enable: bool
    clock: Clock

    def __post_init__(self) -> None:
        self._followers_since_s: float | None = None
        self._followers: frozenset[int] = frozenset()

    def broker_id(self, config: SubscriptionGroupConfig, behind_bytes: int) -> int:
        """Return where a group's next pull should go."""
        if not self.slave_read_enable:
            return LEADER_ID
        slow = behind_bytes > self.recent_bytes
        wanted = config.which_broker_when_consume_slowly if slow else config.broker_id
        if self._group.leadership is None:
            return self.own_id if slow or wanted == self.own_id else LEADER_ID
        if wanted == LEADER_ID:
            return LEADER_ID
        followers = self._followers_now()
        if wanted in followers:
            return wanted
        return min(followers) if slow and followers else LEADER_ID

    def _followers_now(self) -> frozenset[int]:
        now = self.clock.monotonic()
        if self._followers_since_s is None or now - self._followers_since_s >= FOLLOWERS_AGE_S:
            self._followers_since_s = now
            status = self._group.status()
            found = (
                self._id_of(name)
                for name, row in status.get("peers", {}).items()
                if self._has_almost_everything(row)
            )
            self._followers = frozenset(follower for follower in found if follower is not None)
        return self._followers

    def _id_of(self, member: str) -> int | None:
        """Return the broker id of a follower; None: this node's file does not tell."""
        known = self.follower_ids.get(member)
        if known is not None:
            return known
        number = number_in(member)
        return None if number is None else number + 1

    def _has_almost_everything(self, row: Mapping[str, Any]) -> bool:
        match_index, acked_ms_ago = row["match_index"], row["acked_ms_ago"]
        if not (row["connected"] and row["voter"] and match_index) or acked_ms_ago is None:
            return False
        if acked_ms_ago > ALIVE_MS:
            return False
        log = self._group.log
        try:
            has_up_to = parse_header(log.frame(match_index)).position
        except MQError:
            # Below what is kept here, or damaged: it is far behind, or that is unknown.
            return False
        return log.end_position - has_up_to <= CAUGHT_UP_BYTES
