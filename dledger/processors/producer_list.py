"""GET_ALL_PRODUCER_INFO (328): every producer that is connected here.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from dledger.processors.client_table import Client, ClientTable
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.bodies import ProducerInfo, ProducerTableInfo
from remoting.protocol.command import RemotingCommand, response_to
from remoting.seams import Clock


class ProducerListProcessor:
    """Answers 328."""

    def __init__(self, clients: ClientTable[Connection], *, clock: Clock) -> None:
        self._clients = clients
        self._clock = clock

    def handle(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Return the groups with their clients."""
        body = ProducerTableInfo(
            data={
                group: [self._info(client) for client in self._clients.producers(group)]
                for group in self._clients.producer_groups()
            }
        )
        return response_to(command, 0, None, None, body.encode())

    def _info(self, client: Client[Connection]) -> ProducerInfo:
        silent_ms = round(1000 * (self._clock.monotonic() - client.last_update))
        return ProducerInfo(
            client_id=client.client_id,
            remote_ip=client.address,
            language=client.language,
            version=client.version,
            last_update_timestamp=self._clock.wall_ms() - silent_ms,
        )
