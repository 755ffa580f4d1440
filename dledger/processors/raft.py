"""Raft and our own protocol: RAFT_CHANGE (51105), RAFT_STATUS (51102), CAPABILITIES (51100).

RAFT_CHANGE adds, removes and replaces members and transfers the leadership; the leader answers it.
Header fields: ``op`` is ``add``, ``remove``, ``replace`` or ``transfer``; ``name`` the member's
id; ``address`` its peer address ``host:port`` for ``add`` and ``replace``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec

from dledger.broker_settings import BrokerSettings
from dledger.group_api import BrokerGroup
from dledger.membership_changes import MembershipChanges
from dledger.processors.answers import RefusedError
from dledger.processors.handles import Limit, handles
from remoting.access.accounts import ADMIN, SIGNED
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.outcome import Condition


class RaftChangeProcessor:
    """Answers 51105 when the change is committed."""

    def __init__(self, changes: MembershipChanges) -> None:
        self._changes = changes

    @handles(RequestCode.RAFT_CHANGE, limit=Limit.RAFT_CHANGE, rule=ADMIN, local=True)
    async def handle(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Carry the change out.

        Raises:
            RefusedError: The request is no change; nothing was changed.
            MQError: What `MembershipChanges` raises.
        Cancellation: The change may go on.
        """
        op, name = _text(command, "op"), _text(command, "name")
        if not name and op != "transfer":
            raise RefusedError(Condition.BAD_REQUEST, "the name of the member is missing")
        match op:
            case "add":
                await self._changes.add(name, _address(command))
            case "replace":
                await self._changes.replace(name, _address(command))
            case "remove":
                await self._changes.remove(name)
            case "transfer":
                await self._changes.transfer(name or None)
            case _:
                raise RefusedError(
                    Condition.BAD_REQUEST, f"op {op!r} is not add, remove, replace or transfer"
                )
        return response_to(command)


def _text(command: RemotingCommand, field: str) -> str:
    value = (command.ext or {}).get(field)
    return value if isinstance(value, str) else ""


def _address(command: RemotingCommand) -> tuple[str, int]:
    text = _text(command, "address")
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise RefusedError(Condition.BAD_REQUEST, f"address {text!r} is not host:port")
    return host.strip("[]"), int(port)


class RaftStatusProcessor:
    """Answers 51102 with a JSON object, on every replica."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings) -> None:
        self._group = group
        self._settings = settings

    @handles(RequestCode.RAFT_STATUS, limit=Limit.CLIENT, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return role, term, indexes and peers, and the names of this broker."""
        status = {
            "cluster": self._settings.broker.cluster_name,
            "brokerName": self._settings.broker.broker_name,
            "address": self._settings.address,
            **self._group.status(),
        }
        return response_to(command, 0, None, None, msgspec.json.encode(status))


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

    @handles(RequestCode.CAPABILITIES, limit=Limit.CLIENT, rule=SIGNED)
    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return what this broker understands beside RocketMQ's protocol."""
        ext = {**self._ext, "groupIdentity": self._group.group_identity}
        return response_to(command, 0, None, ext)
