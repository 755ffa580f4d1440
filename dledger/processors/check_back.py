"""CHECK_TRANSACTION_STATE (39): asks a producer what became of its transaction.

Spec: remoting fact sheet, section 9; semantics, section 3.
"""

from __future__ import annotations

from commitlog.errors import MQError
from commitlog.message_id import encode_offset_message_id
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.client_table import ClientTable
from dledger.services.half_message import HalfMessage
from remoting.connection import Connection
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from remoting.protocol.headers import CheckTransactionStateHeader


class CheckBack:
    """Implements `dledger.services.transaction_check.Producers` with the connected clients."""

    def __init__(self, clients: ClientTable[Connection], settings: BrokerSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._turn = 0

    def is_there(self, group: str) -> bool:
        """Tell whether a producer of *group* has sent a heartbeat over a connection that lives."""
        return bool(self._clients.producers(group))

    def ask(self, half: HalfMessage, checks: int) -> bool:
        """Ask the next producer of the group that takes it, all in turn."""
        clients = self._clients.producers(half.group)
        self._turn += 1
        question = half.question(checks)
        for step in range(len(clients)):
            client = clients[(self._turn + step) % len(clients)]
            try:
                client.channel.invoke_oneway(self._question(half, question))
            except MQError:
                continue  # it is leaving, or reads too slowly; another one knows as well
            return True
        return False

    def _question(self, half: HalfMessage, question: bytes) -> RemotingCommand:
        record = half.record
        header = CheckTransactionStateHeader(
            tran_state_table_offset=record.queue_offset,
            commit_log_offset=record.phy_offset,
            msg_id=half.transaction_id,
            transaction_id=half.transaction_id,
            offset_msg_id=encode_offset_message_id(self._settings.store_host, record.phy_offset),
            topic=half.topic,
            bname=self._settings.broker_name,
        )
        return request(RequestCode.CHECK_TRANSACTION_STATE, dict(header.encode()), question)
