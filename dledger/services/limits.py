"""Limits of a broker group: topics, groups, offsets and clients, each account's, and disk space.

Accounts that may send or consume may also make names, which every member keeps until they are
deleted. Names that exist already are never refused. The leader counts what it sees an account make;
a new leader has counted nothing yet. Administrators and requests without an account are bounded by
the limits of the broker alone.

Disk space is measured every second, on every role. Above the warning level, or with less than a
segment left, a leader refuses sends and takes what the group itself has to write. Below it again it
takes sends, by itself.

Spec: docs/internals/protocol/store.md, section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import structlog

from dledger.broker_errors import TableFullError
from dledger.commitlog.errors import DiskFullError
from dledger.group_api import BrokerGroup
from dledger.settings.tables import BrokerTable, StoreTable

# ---------------------------------------------------------------------------------- tables


GROUPS_PER_HEARTBEAT: Final = 1_024
"""Consumer and producer groups of one client: a program has a handful; each costs a table row on
every broker that it sends heartbeats to."""

SUBSCRIPTIONS_PER_GROUP: Final = 20_000
"""Topics one consumer subscribes to in one group: every topic there can be by default, or so."""

CLIENT_ID_CHARACTERS: Final = 1_024
"""Characters of a client's id: address, process and instance name are far below it."""


_FEWER_OFFSETS: Final = "delete groups with their offsets"

LIMITS: Final[Mapping[str, tuple[str, str]]] = {
    "max_topics": ("topics", "delete topics"),
    "max_groups": ("consumer groups", "delete groups"),
    "max_group_topics": ("topics with offsets of groups", _FEWER_OFFSETS),
    "max_topics_per_group": ("topics with offsets of this group", _FEWER_OFFSETS),
    "max_clients": ("clients", "close clients"),
    "max_clients_per_group": ("clients of this group", "close clients"),
    "max_topics_per_account": ("topics of this account", "delete topics"),
    "max_groups_per_account": ("consumer groups of this account", "delete groups"),
    "max_group_topics_per_account": (
        "topics with offsets of groups, made by this account,",
        _FEWER_OFFSETS,
    ),
    "max_clients_per_account": ("clients of this account", "close clients"),
}
"""Name of a setting in ``[broker]`` → what it limits, and how to have fewer."""


def check_limit(settings: BrokerTable, name: str, present: int, more: int = 1) -> None:
    """Let *more* be made beside those that are *present*.

    Raises TableFullError: the limit is met; nothing was stored.
    """
    limit: int = getattr(settings, name)
    if present + more > limit:
        what, way_out = LIMITS[name]
        raise TableFullError(
            f"{present} {what} are there and broker.{name} allows {limit}; nothing was stored;"
            f" {way_out} that are not used, or raise broker.{name}"
        )


Name = tuple[str, ...]
"""A topic; a consumer group; a consumer group and a topic that has offsets of it."""


class Made(Enum):
    """What an account makes, and the setting that limits it."""

    TOPIC = "max_topics_per_account"
    GROUP = "max_groups_per_account"
    GROUP_TOPIC = "max_group_topics_per_account"


class AccountShares:
    """What accounts have made."""

    def __init__(self, group: BrokerGroup, settings: BrokerTable) -> None:
        """Count from nothing."""
        self._settings = settings
        state = group.state
        self._is_there: Mapping[Made, Callable[[Name], bool]] = {
            Made.TOPIC: lambda name: state.topic_config(name[0]) is not None,
            Made.GROUP: lambda name: state.subscription_group(name[0]) is not None,
            Made.GROUP_TOPIC: lambda name: (name[0], name[1]) in state.consumer_offsets,
        }
        self._made: dict[tuple[Made, str], dict[Name, None]] = {}

    def make(self, kind: Made, account: str, *name: str) -> None:
        """Count what an account makes now; nothing without an account.

        Raises TableFullError: the account has made as many as it may; nothing was stored.
        """
        if not account:
            return
        made = self._made.setdefault((kind, account), {})
        if name in made:
            return
        try:
            check_limit(self._settings, kind.value, len(made))
        except TableFullError:
            is_there = self._is_there[kind]
            for one in [one for one in made if not is_there(one)]:
                del made[one]
            check_limit(self._settings, kind.value, len(made))
        made[name] = None


# ---------------------------------------------------------------------------------- the disk


log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False, slots=True)
class DiskSpace:
    """How full the disk is."""

    _disk_ratio: Callable[[], float]
    _settings: StoreTable
    _lacks_segment: Callable[[], bool] = lambda: False
    """Whether the disk has less than a segment of the log left."""
    ratio: float = 0.0
    reason: str = ""
    """Why sends are to be refused; empty: they are not."""

    @property
    def is_full(self) -> bool:
        """Whether sends are to be refused."""
        return self.reason != ""

    @property
    def warning_ratio(self) -> float:
        """Used part of the disk from which sends are refused."""
        return self._settings.disk_space_warning_level_ratio / 100

    def measure(self) -> None:
        """Measure the disk; to be called once a second."""
        self.ratio = self._disk_ratio()
        was_full, self.reason = self.is_full, ""
        if self.ratio >= self.warning_ratio:
            self.reason = (
                f"the disk is {self.ratio:.0%} full, sends are refused from"
                f" {self.warning_ratio:.0%} on (diskSpaceWarningLevelRatio)"
            )
        elif self._lacks_segment():
            self.reason = "less space is left on the disk than a segment takes, sends are refused"
        if self.is_full and not was_full:
            log.error("disk_full", used_ratio=round(self.ratio, 4), reason=self.reason)
        elif was_full and not self.is_full:
            log.info("disk_has_space", used_ratio=round(self.ratio, 4))

    def status(self) -> Mapping[str, str]:
        """Return what `dledger raft status` shows of it."""
        return {"disk_full": self.reason}

    def full_error(self) -> DiskFullError:
        """Return the error for a send that is refused: nothing was stored, later it may be."""
        return DiskFullError(f"{self.reason}; nothing was stored, later it may be")
