"""The TLS contexts of a broker, watched together with the files they are made of."""

from __future__ import annotations

import ssl

from commitlog.seams import Disk
from dledger.config import BrokerConfig
from dledger.raft.settings import RaftSettings
from remoting.certificates import Certificates, TlsFiles
from remoting.seams import ServerTls


def watched_certificates(
    config: BrokerConfig,
    disk: Disk,
    *,
    clients: ServerTls,
    names: ssl.SSLContext | None,
    raft: RaftSettings,
) -> Certificates:
    """Return what keeps the contexts of a broker as their files are.

    Args:
        clients: Of the ports of clients.
        names: Towards NameServers, and to the leader.
        raft: Has those between the members.
    Raises:
        OSError: A file cannot be read.
    """
    of_server, of_raft, of_client = config.server, config.raft, config.client
    peers = TlsFiles(of_raft.tls_cert_file, of_raft.tls_key_file, of_raft.tls_ca_file)
    found = Certificates(disk)
    found.watch(
        clients.context,
        TlsFiles(of_server.tls_cert_file, of_server.tls_key_file, of_server.tls_ca_file),
    )
    found.watch(
        names, TlsFiles(of_client.tls_cert_file, of_client.tls_key_file, of_client.tls_ca_file)
    )
    found.watch(raft.listen_tls.context if raft.listen_tls is not None else None, peers)
    found.watch(raft.dial_tls, peers)
    return found
