"""Who asks for a change, and whether the request confirms that messages are given up by it.

RocketMQ's tools know no confirmation: what gives up messages is refused to them with the command
that shows what would go and does it.
"""

from __future__ import annotations

from typing import Final

from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand
from remoting.protocol.signature import ACCESS_KEY

CONFIRMED: Final = "dledgerConfirmed"
"""Field of a request; `true`: what the change gives up has been shown and is agreed to."""

PLAN_ONLY: Final = "dledgerPlanOnly"
"""Field of a request; `true`: nothing is changed, the answer says what would go."""


def asked_by(connection: Connection, command: RemotingCommand) -> str:
    """Return the account, where requests are signed, and the host that a request came from."""
    host = connection.peer_address[0]
    account = command.ext.get(ACCESS_KEY)
    return f"{account} at {host}" if account else host


def is_confirmed(command: RemotingCommand) -> bool:
    """Tell whether the request confirms it."""
    return command.ext.get(CONFIRMED) == "true"


def is_plan_only(command: RemotingCommand) -> bool:
    """Tell whether the request only asks what would go."""
    return command.ext.get(PLAN_ONLY) == "true"
