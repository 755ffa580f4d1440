"""The SDK opened on the real world, for commands."""

from __future__ import annotations

import os
from collections.abc import Sequence

from client.client_instance import ClientConfig, ClientInstance
from remoting.edge import SystemRng, TcpNetwork, TrioClock


def open_client(namesrvs: Sequence[str]) -> ClientInstance:
    """Return a client instance of this process; enter it with ``async with``."""
    return ClientInstance(
        ClientConfig(name_servers=tuple(namesrvs), pid=os.getpid()),
        clock=TrioClock(),
        network=TcpNetwork(),
        rng=SystemRng(),
    )
