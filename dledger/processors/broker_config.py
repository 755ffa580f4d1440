"""GET_BROKER_CONFIG (26) and UPDATE_BROKER_CONFIG (25): the settings of this one broker.

Spec: remoting fact sheet, section 10: properties as text, both ways.
"""

from __future__ import annotations

from typing import Final

import structlog

from commitlog.errors import ConfigError
from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.live_settings import LiveSettings
from dledger.processors.confirmation import asked_by, is_confirmed
from remoting.connection import Connection
from remoting.errors import BadRequestError
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.signature import ACCESS_KEY
from remoting.settings.properties import read_properties

CHANGE_BYTES_MAX: Final = 64 * 1024
"""Largest body of a change: all settings there are, with room."""

_log = structlog.get_logger(__name__)


class BrokerConfigProcessor:
    """Answers 25 and 26."""

    def __init__(self, live: LiveSettings) -> None:
        self._live = live

    def get(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Return all settings, and in ``version`` how new they are."""
        version = self._live.version.encode().decode()
        return response_to(command, 0, None, {"version": version}, self._live.text().encode())

    def update(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Change settings until this broker stops; all of them or none.

        Raises:
            SettingRefusedError, ConfirmationNeededError, BadRequestError: Nothing was changed.
        """
        try:
            notes = self._live.update(
                _changes(command),
                asked_by=asked_by(connection),
                is_confirmed=is_confirmed(command),
            )
        except (SettingRefusedError, ConfirmationNeededError) as error:
            _log.warning(
                "setting_refused",
                error=str(error),
                peer=connection.peer_address[0],
                access_key=command.ext.get(ACCESS_KEY),
            )
            raise
        version = self._live.version.encode().decode()
        return response_to(command, 0, "; ".join(notes) or None, {"version": version})


def _changes(command: RemotingCommand) -> dict[str, str]:
    body = bytes(command.body)
    if len(body) > CHANGE_BYTES_MAX:
        raise BadRequestError(f"{len(body)} bytes of settings, at most {CHANGE_BYTES_MAX}")
    try:
        changes = read_properties(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequestError(f"body is not UTF-8: {error}") from error
    except ConfigError as error:
        raise BadRequestError(str(error)) from error
    if not changes:
        raise BadRequestError("no setting is named: key=value, one a line")
    return changes
