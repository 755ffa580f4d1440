"""Who asks for a change, and whether the request confirms that messages are given up by it."""

from __future__ import annotations

from remoting.access.gate import admitted_account
from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand
from remoting.protocol.confirmation import CONFIRMED_FIELD


def asked_by(connection: Connection) -> str:
    """Return the account, where there is access control, and the host that a request came from.

    A name that nobody checked is not shown: it would let one person act under another's. Call it
    before the handler returns or waits.
    """
    host = connection.peer_address[0]
    account = admitted_account(connection)
    return f"{account} at {host}" if account else host


def is_confirmed(command: RemotingCommand) -> bool:
    """Tell whether the request confirms that messages are given up."""
    return command.ext.get(CONFIRMED_FIELD) == "true"
