"""Security from the settings: TLS, accounts, credentials, the group's secret."""

from __future__ import annotations

import ssl

from commitlog.errors import ConfigError
from commitlog.seams import Disk
from dledger.config import BrokerConfig
from dledger.raft.identity import GroupSecret
from remoting.access.account_file import parse_credentials
from remoting.protocol.signature import Credentials
from remoting.seams import ServerTls
from remoting.tcp import client_tls, server_tls


def listener_tls(config: BrokerConfig) -> ServerTls:
    """Return the TLS of the client port.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    server = config.server
    return server_tls(
        server.tls_mode,
        cert_file=server.tls_cert_file or None,
        key_file=server.tls_key_file or None,
        client_ca_file=server.tls_ca_file or None,
    )


def namesrv_tls(config: BrokerConfig) -> ssl.SSLContext | None:
    """Return the TLS towards NameServers; None: plain.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    client = config.client
    if not client.tls_enable:
        return None
    return client_tls(
        ca_file=client.tls_ca_file or None,
        cert_file=client.tls_cert_file or None,
        key_file=client.tls_key_file or None,
    )


def peer_tls(config: BrokerConfig) -> tuple[ServerTls, ssl.SSLContext] | None:
    """Return the TLS between members, for listening and for dialling; None: plain.

    Both sides show a certificate of the same authorities.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    raft = config.raft
    if not raft.tls_cert_file:
        return None
    cert, key, authorities = raft.tls_cert_file, raft.tls_key_file, raft.tls_ca_file
    return (
        server_tls("enforcing", cert_file=cert, key_file=key, client_ca_file=authorities),
        client_tls(ca_file=authorities, cert_file=cert, key_file=key),
    )


def group_secret(config: BrokerConfig, disk: Disk) -> GroupSecret | None:
    """Return what the members share; None: nothing.

    Raises:
        ConfigError: The file cannot be read, or holds too little.
    """
    path = config.raft.secret_file
    if not path:
        return None
    try:
        return GroupSecret(_read(disk, path).strip())
    except ConfigError as error:
        raise ConfigError(f"raft.secret_file: {error}") from None


def own_credentials(config: BrokerConfig, disk: Disk) -> Credentials | None:
    """Return whom this broker calls itself to NameServers; None: it does not sign.

    Raises:
        ConfigError: The file cannot be read, or not as credentials.
    """
    path = config.client.credentials_file
    return parse_credentials(path, _read(disk, path)) if path else None


def _read(disk: Disk, path: str) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
