"""Settings of a broker that are its own: the members of a group differ in them."""

from __future__ import annotations

from typing import Final

OWN_KEYS: Final = frozenset(
    {
        "brokerIP1",
        "listenPort",
        "bindAddress",
        "fastListenPort",
        "storePathRootDir",
        "dLegerSelfId",
        "brokerId",
        "broker.advertised_port",
        "raft.listen_port",
        "raft.tls_cert_file",
        "raft.tls_key_file",
        "client.credentials_file",
        "server.acl_file",
    }
)
"""Keys whose values are meant to differ between the brokers of a group."""
