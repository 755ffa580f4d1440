"""Who asks for a change, and whether the request confirms that messages are given up by it."""

from __future__ import annotations

from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand
from remoting.protocol.confirmation import CONFIRMED_FIELD
from remoting.protocol.signature import ACCESS_KEY


def asked_by(connection: Connection, command: RemotingCommand) -> str:
    """Return the account, where requests are signed, and the host that a request came from."""
    host = connection.peer_address[0]
    account = command.ext.get(ACCESS_KEY)
    return f"{account} at {host}" if account else host


def is_confirmed(command: RemotingCommand) -> bool:
    """Tell whether the request confirms that messages are given up."""
    return command.ext.get(CONFIRMED_FIELD) == "true"
