"""GET_ALL_CONSUMER_OFFSET (43) and GET_ALL_DELAY_OFFSET (45): tables that RocketMQ's slaves copy.

Members of a group need neither: both tables are in their log. Tools and exporters read them.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from dledger.group_api import BrokerGroup
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    DataVersion,
    DelayOffsetSerializeWrapper,
)
from remoting.protocol.command import RemotingCommand, response_to


class SlaveSyncProcessor:
    """Answers from what is applied, on any member."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group

    def consumer_offsets(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 43."""
        state = self._group.state
        body = ConsumerOffsetSerializeWrapper(
            offset_table={
                f"{topic}@{group}": dict(sorted(offsets.items()))
                for (group, topic), offsets in sorted(state.consumer_offsets.items())
            },
            data_version=self._version(),
        )
        return response_to(command, 0, None, None, body.encode())

    def delay_offsets(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 45."""
        body = DelayOffsetSerializeWrapper(
            offset_table=dict(sorted(self._group.state.delay_progress.items())),
            data_version=self._version(),
        )
        return response_to(command, 0, None, None, body.encode())

    def _version(self) -> DataVersion:
        state = self._group.state
        return DataVersion(
            timestamp=state.last_store_time_ms,
            counter=state.applied_index,
            state_version=state.applied_term,
        )
