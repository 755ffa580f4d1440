"""CLEAN_EXPIRED_CONSUMEQUEUE (306), CLEAN_UNUSED_TOPIC (316), DELETE_EXPIRED_COMMITLOG (329).

Consume queues are cut with the log, and those of a topic go with it: there is nothing left over
that 306 and 316 could clean. 329 lets expired segments go now instead of at `deleteWhen`.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dledger.group_api import BrokerGroup
from dledger.processors.confirmation import asked_by
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.command import RemotingCommand, response_to

_log = structlog.get_logger(__name__)


class CleanUpProcessor:
    """Answers all three with success, on any member: tools ask them all.

    Args:
        expire_soon: Lets expired segments go at the next look, whatever the hour; takes who asked.
    """

    def __init__(self, group: BrokerGroup, expire_soon: Callable[[str], None]) -> None:
        self._group = group
        self._expire_soon = expire_soon

    def nothing_to_clean(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 306 and 316."""
        return response_to(command)

    def delete_expired(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 329; the leader decides for all members. What has not expired stays."""
        if self._group.leadership is not None:
            who = asked_by(connection)
            _log.info("expired_segments_asked_for", asked_by=who)
            self._expire_soon(who)
        return response_to(command)
