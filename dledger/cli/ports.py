"""Free loopback ports for child processes, chosen so that no two processes choose the same.

A port is chosen some time before its server listens there, and again free while that server is
down. Until then another process that starts a cluster must leave it alone: each claims a block of
ports for as long as it runs, by a name in the abstract namespace of Unix sockets, which the kernel
frees when the process ends and keeps apart for each network namespace.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator

from dledger.output import CliError

OWN_PORTS = range(15_000, 32_768)
"""Below Linux' range for outgoing connections, 32768 to 60999."""

BLOCK_PORTS = 64
"""Ports of one block; half of them are handed out: a cluster of five with a proxy needs a dozen."""

_claims: list[socket.socket] = []
"""Held open until the process ends; one for each block."""


def free_ports(count: int) -> list[int]:
    """Return free loopback ports, none of them two below another that was ever returned.

    Some RocketMQ clients try the port two below the one they were given. None lies where the kernel
    takes ports for connections. A port is returned once, and to this process alone.

    Raises CliError: there are fewer.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = next(_unused, None)
        if port is None:
            raise CliError(
                f"fewer than {count} of the ports {OWN_PORTS[0]} to {OWN_PORTS[-1]} are free"
            )
        if is_free(port):
            ports.append(port)
    return ports


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a loopback port can be listened on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _own_ports() -> Iterator[int]:
    """Yield the ports of each block that this process can claim; claim it when it is needed."""
    blocks = range(OWN_PORTS.start, OWN_PORTS.stop, BLOCK_PORTS)
    for start in random.SystemRandom().sample(blocks, len(blocks)):
        if _claim(start):
            ports = range(start, min(start + BLOCK_PORTS, OWN_PORTS.stop))
            yield from (port for port in ports if port % 4 < 2)


_unused = _own_ports()


def _claim(start: int) -> bool:
    """Claim the block that begins with port *start*; True without names to claim."""
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dledger-ports-{start}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
