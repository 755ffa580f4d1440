"""Questions of tests to running clusters: one raw request, and topics."""

from collections.abc import Mapping, Sequence

from dledger.cli.commands import open_admin
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.signature import Credentials


async def ask(
    address: str,
    code: int,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    timeout_s: float = 3.0,
    credentials: Credentials | None = None,
) -> RemotingCommand:
    """Send one request over a connection of its own; return the answer, whatever its code is.

    Raises:
        NoNameServerError: No connection, or no whole answer in time. What was asked for may have
            been done.
    """
    # A NameServer is the daemon that is asked nothing else first.
    async with connect(
        [address], ClientConfig(rpc_timeout_s=timeout_s, credentials=credentials)
    ) as client:
        return await client.name_servers.ask_at(address, request(code, dict(ext or {}), body))


async def create_topic(
    namesrvs: Sequence[str], topic: str, *, queues: int, brokers: Sequence[str] | None = None
) -> list[str]:
    """Create a topic in every broker group, or in some; return their names."""
    names = None if brokers is None else tuple(brokers)
    async with open_admin(namesrvs) as admin:
        return await admin.create_topic(topic, queue_nums=queues, broker_names=names)
