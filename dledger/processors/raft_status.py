"""RAFT_STATUS (51102): one replica's view of its group."""

from __future__ import annotations

import msgspec

from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.command import RemotingCommand, response_to


class RaftStatusProcessor:
    """Answers 51102 with a JSON object, on every replica."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings) -> None:
        self._group = group
        self._settings = settings

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return role, term, indexes and peers, and who this is."""
        status = {
            "cluster": self._settings.cluster_name,
            "brokerName": self._settings.broker_name,
            "address": self._settings.address,
            **self._group.status(),
        }
        return response_to(command, 0, None, None, msgspec.json.encode(status))
