"""RAFT_CHANGE (51105): members come and go, leadership moves; answered by the leader.

Header fields: ``op`` is ``add``, ``remove``, ``replace`` or ``transfer``; ``name`` the member's
id; ``address`` its peer address ``host:port`` for ``add`` and ``replace``.
"""

from __future__ import annotations

from commitlog.errors import MQError
from dledger.membership_changes import MembershipChanges
from dledger.processors.refusal import RefusedError, refusal
from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.outcome import Condition

MAX_OPEN_CHANGES = 16
"""Changes that wait for each other; a person asks for one at a time."""


class RaftChangeProcessor:
    """Answers 51105 when the change is committed."""

    def __init__(self, changes: MembershipChanges) -> None:
        self._changes = changes

    async def handle(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Carry the change out and say how it went.

        Cancellation: The change may go on.
        """
        try:
            await self._change(command)
        except MQError as error:
            return refusal(command, error)
        return response_to(command)

    async def _change(self, command: RemotingCommand) -> None:
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


def _text(command: RemotingCommand, field: str) -> str:
    value = (command.ext or {}).get(field)
    return value if isinstance(value, str) else ""


def _address(command: RemotingCommand) -> tuple[str, int]:
    text = _text(command, "address")
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise RefusedError(Condition.BAD_REQUEST, f"address {text!r} is not host:port")
    return host.strip("[]"), int(port)
