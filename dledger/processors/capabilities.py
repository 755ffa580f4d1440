"""CAPABILITIES (51100): how our SDK finds out that it talks to one of ours."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dledger.group_api import BrokerGroup
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.command import RemotingCommand, response_to

DISTRIBUTION = "dledger-mq"


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


class CapabilitiesProcessor:
    """Answers 51100. A real RocketMQ answers 3, which means: JSON headers, no record batches."""

    def __init__(self, group: BrokerGroup, broker_name: str) -> None:
        self._group = group
        self._ext = {
            "cbor": "true",
            "records": "true",
            "bulkPull": "true",
            "syncOffsets": "true",
            "idempotent": "true",
            "lockTokens": "true",
            "version": _version(),
            "brokerName": broker_name,
        }

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Say what this broker understands beside RocketMQ's protocol."""
        ext = {**self._ext, "groupIdentity": self._group.group_identity}
        return response_to(command, 0, None, ext)
