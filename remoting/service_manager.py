"""What a daemon reports to the service manager that started it: ready, still running, stopping.

systemd gives a socket in the environment of units with ``Type=notify``, and a time with
``WatchdogSec``. Without them nothing is sent.

Spec: docs/operate/deploy.md.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

from dledger.remoting.log import get_logger
from dledger.remoting.seams import Clock

_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = "WATCHDOG_USEC"
_WATCHDOG_PID: Final = "WATCHDOG_PID"

_log = get_logger(__name__)


class ServiceManager:
    """Reports to the socket that *environment* names."""

    def __init__(self, environment: Mapping[str, str], pid: int) -> None:
        self._address = environment.get(_SOCKET, "")
        text = environment.get(_WATCHDOG, "")
        is_ours = environment.get(_WATCHDOG_PID, str(pid)) == str(pid)
        is_set = bool(self._address) and is_ours and text.isdecimal()
        self.watchdog_s = int(text) / 1_000_000 if is_set else 0.0

    def started(self, value: object = None) -> None:
        """Report that the daemon listens; has the form of a `trio.TaskStatus`."""
        self._notify("READY=1")

    def stopping(self) -> None:
        """Report that the daemon stops by itself."""
        self._notify("STOPPING=1")

    async def keep_watchdog(self, clock: Clock) -> None:
        """Report twice in the watchdog's time that the event loop runs, until cancelled."""
        while self.watchdog_s > 0:
            self._notify("WATCHDOG=1")
            await clock.sleep(self.watchdog_s / 2)

    def _notify(self, state: str) -> None:
        if not self._address:
            return
        # A name that begins with @ is none of the file system.
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
                to.setblocking(False)
                to.sendto(state.encode(), name)
        except OSError as error:
            _log.warning("service_manager_not_reached", state=state, error=str(error))
