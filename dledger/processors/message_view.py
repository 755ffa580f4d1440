"""VIEW_MESSAGE_BY_ID (33): one record by its position."""

from __future__ import annotations

from commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from dledger.group_api import BrokerGroup
from dledger.processors.refusal import RefusedError, refusal
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import ViewMessageHeader
from remoting.protocol.outcome import Condition


class MessageViewProcessor:
    """Answers 33, from applied entries only."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the record that begins at the offset asked for."""
        header = ViewMessageHeader.decode(command.ext)
        if 0 <= header.offset < self._group.state.applied_end_position:
            try:
                return response_to(command, 0, None, None, self._group.log.record_at(header.offset))
            except (OffsetOutOfRangeError, CorruptRecordError):
                pass  # no record begins there: told below
        return refusal(
            command,
            RefusedError(
                Condition.BAD_REQUEST,
                f"can not find message by the offset, {header.offset}",
            ),
        )
