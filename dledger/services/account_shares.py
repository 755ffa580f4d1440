"""How much of the tables of a broker group each account may make.

Names do not say who made them, so the leader counts what it sees an account make; a broker that
begins to lead has counted nothing yet. What has been deleted since does not count. Administrators
make topics and groups for others, and a request without an account says only which address it came
from, which is a gateway's or a whole cluster's: both are bounded by the limits of the broker alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from dledger.broker_errors import TableFullError
from dledger.group_api import BrokerGroup
from dledger.services.table_limits import TableLimits

Name = tuple[str, ...]
"""A topic; a consumer group; a consumer group and a topic that has offsets of it."""


class Made(Enum):
    """What an account makes."""

    TOPIC = "topic"
    GROUP = "group"
    GROUP_TOPIC = "group_topic"


class AccountShares:
    """What accounts have made.

    The names of an account are bounded by its limits, the accounts by the account file.
    """

    def __init__(self, group: BrokerGroup, limits: TableLimits) -> None:
        """Count from nothing."""
        self._limits = limits
        self._check: Mapping[Made, Callable[[int], None]] = {
            Made.TOPIC: limits.check_topics_of_account,
            Made.GROUP: limits.check_groups_of_account,
            Made.GROUP_TOPIC: limits.check_group_topics_of_account,
        }
        state = group.state
        self._is_there: Mapping[Made, Callable[[Name], bool]] = {
            Made.TOPIC: lambda name: state.topic_config(name[0]) is not None,
            Made.GROUP: lambda name: state.subscription_group(name[0]) is not None,
            Made.GROUP_TOPIC: lambda name: (name[0], name[1]) in state.consumer_offsets,
        }
        self._made: dict[tuple[Made, str], dict[Name, None]] = {}

    def make(self, kind: Made, account: str, *name: str) -> None:
        """Count what an account makes now; nothing without an account.

        Args:
            name: It is not there yet. Counted again, it counts once.
        Raises:
            TableFullError: The account has made as many as it may; nothing was stored.
        """
        if not account:
            return
        made = self._made.setdefault((kind, account), {})
        if name in made:
            return
        try:
            self._check[kind](len(made))
        except TableFullError:
            is_there = self._is_there[kind]
            for one in [one for one in made if not is_there(one)]:
                del made[one]
            self._check[kind](len(made))
        made[name] = None
