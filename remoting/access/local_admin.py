"""Without access control: requests that erase data or change the cluster come from this machine.

RocketMQ answers them for every host that reaches the port. Here the setting `open_admin` has to
be on for that; creating topics and consumer groups stays open, as in RocketMQ.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from remoting.connection import Connection
from remoting.errors import AccessRefusedError
from remoting.log import get_logger
from remoting.processor import Handled
from remoting.processor_table import Handler
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand

_log = get_logger(__name__)


class LocalAdmin:
    """Refuses some requests of other machines before anything has happened.

    Attributes:
        refused: Requests refused so far.
    """

    def __init__(self, codes: Collection[int]) -> None:
        """Make a guard for *codes*; requests of other codes are not looked at."""
        self._codes = frozenset(codes)
        self._logged: set[int] = set()
        self.refused = 0

    def guard(self, code: int, handler: Handler) -> Handler:
        """Return *handler*, with the check before it if *code* is one of those guarded."""
        if code not in self._codes:
            return handler

        def guarded(connection: Connection, command: RemotingCommand) -> Handled:
            self.admit(connection.peer_address[0], code)
            return handler(connection, command)

        return guarded

    def admit(self, host: str, code: int) -> None:
        """Let a request pass.

        Raises:
            AccessRefusedError: It came from another machine; nothing was done.
        """
        if is_loopback(host):
            return
        self.refused += 1
        name = RequestCode(code).name
        if code not in self._logged:
            # Once for each code: the table is small, and a stranger does not fill the log.
            self._logged.add(code)
            _log.warning(
                "remote_admin_refused",
                peer=host,
                request=name,
                next_step="set aclEnable with accounts, or openAdmin=true",
            )
        raise AccessRefusedError(
            f"{name} ({code}) erases data or changes the cluster. Without access control it is "
            f"taken from the daemon's own machine only: run the tool there, or set aclEnable=true "
            f"with an account for the tool, or openAdmin=true"
        )


def is_loopback(host: str) -> bool:
    """Whether a peer with this address is on the daemon's own machine."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
