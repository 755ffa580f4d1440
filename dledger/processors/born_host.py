"""A client's address as records hold it."""

from __future__ import annotations

from commitlog.errors import LocalProtocolError
from commitlog.record import NO_HOST, pack_host
from remoting.connection import Connection

_ATTRIBUTE = "born_host"
_MAPPED_IPV4 = "::ffff:"


def born_host_of(connection: Connection) -> bytes:
    """Return the packed address of the other end, worked out once for each connection."""
    known = connection.attributes.get(_ATTRIBUTE)
    if known is None:
        known = connection.attributes[_ATTRIBUTE] = _pack(*connection.peer_address)
    return bytes(known)


def _pack(host: str, port: int) -> bytes:
    # A dual-stack listener sees IPv4 clients as mapped addresses.
    if host.lower().startswith(_MAPPED_IPV4) and "." in host:
        host = host[len(_MAPPED_IPV4) :]
    try:
        return pack_host(host.partition("%")[0], port)
    except LocalProtocolError:
        return NO_HOST
