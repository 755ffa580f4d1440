"""How many topics, groups, offsets and clients one broker group holds, and the refusal beyond it.

Whoever may send or consume may also make names; each is kept by every member, in every snapshot
and registration, until somebody deletes it. Names that are there already are never refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dledger.broker_errors import TableFullError

GROUPS_PER_HEARTBEAT: Final = 1_024
"""Consumer and producer groups of one client: a program has a handful; each costs a table row on
every broker that it sends heartbeats to."""

SUBSCRIPTIONS_PER_GROUP: Final = 20_000
"""Topics one consumer subscribes to in one group: every topic there can be by default, or so."""

CLIENT_ID_CHARACTERS: Final = 1_024
"""Characters of a client's id: address, process and instance name are far below it."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """The limits, as settings of ``[broker]`` have them.

    Attributes:
        topics: Retry and dead letter topics of groups included.
        groups: Consumer groups.
        group_topics: Pairs of a consumer group and a topic that has offsets of it.
        topics_per_group: Of these, pairs of one group.
        clients: Connected clients; one counts once for each group it is in.
        clients_per_group: Of these, clients of one group.
        topics_per_account: Of the topics, those one account made; see `AccountShares`.
        groups_per_account: Likewise of the groups.
        group_topics_per_account: Likewise of the pairs of a group and a topic.
        clients_per_account: Of the clients, those connected as one account.
    """

    topics: int = 50_000
    groups: int = 20_000
    group_topics: int = 200_000
    topics_per_group: int = 20_000
    clients: int = 100_000
    clients_per_group: int = 10_000
    topics_per_account: int = 10_000
    groups_per_account: int = 5_000
    group_topics_per_account: int = 50_000
    clients_per_account: int = 25_000

    def check_topics(self, there: int, more: int = 1) -> None:
        """Let *more* topics be made where *there* are so many.

        Raises:
            TableFullError: The limit is met; nothing was stored.
        """
        _check(there, more, self.topics, "topics", "max_topics", "delete topics")

    def check_groups(self, there: int, more: int = 1) -> None:
        """Let *more* consumer groups be made; as `check_topics`."""
        _check(there, more, self.groups, "consumer groups", "max_groups", "delete groups")

    def check_group_topics(self, there: int, of_group: int) -> None:
        """Let a group commit an offset in a topic where it has none; as `check_topics`."""
        ways_out = "delete groups with their offsets"
        _check(
            there,
            1,
            self.group_topics,
            "topics with offsets of groups",
            "max_group_topics",
            ways_out,
        )
        _check(
            of_group,
            1,
            self.topics_per_group,
            "topics with offsets of this group",
            "max_topics_per_group",
            ways_out,
        )

    def check_clients(self, there: int, of_group: int) -> None:
        """Let a client join a group; as `check_topics`."""
        _check(there, 1, self.clients, "clients", "max_clients", "close clients")
        _check(
            of_group,
            1,
            self.clients_per_group,
            "clients of this group",
            "max_clients_per_group",
            "close clients",
        )

    def check_topics_of_account(self, made: int) -> None:
        """Let an account make one more topic; as `check_topics`."""
        limit = self.topics_per_account
        _check(made, 1, limit, "topics of this account", "max_topics_per_account", "delete topics")

    def check_groups_of_account(self, made: int) -> None:
        """Let an account make one more consumer group; as `check_topics`."""
        _check(
            made,
            1,
            self.groups_per_account,
            "consumer groups of this account",
            "max_groups_per_account",
            "delete groups",
        )

    def check_group_topics_of_account(self, made: int) -> None:
        """Let an account commit an offset where a group has none; as `check_topics`."""
        _check(
            made,
            1,
            self.group_topics_per_account,
            "topics with offsets of groups, made by this account,",
            "max_group_topics_per_account",
            "delete groups with their offsets",
        )

    def check_clients_of_account(self, there: int) -> None:
        """Let an account's client join a group; as `check_topics`."""
        _check(
            there,
            1,
            self.clients_per_account,
            "clients of this account",
            "max_clients_per_account",
            "close clients",
        )


def _check(there: int, more: int, limit: int, what: str, setting: str, way_out: str) -> None:
    if there + more > limit:
        raise TableFullError(
            f"{there} {what} are there and broker.{setting} allows {limit}; nothing was stored;"
            f" {way_out} that are not used, or raise broker.{setting}"
        )
