"""Makes a client for real use: sockets, clock, randomness, and what the environment names.

========================= ==============================================================
variable                  holds
========================= ==============================================================
NAMESRV_ADDR              NameServers, as RocketMQ's clients read it
DLEDGER_CREDENTIALS       a file with access_key and secret_key, or RocketMQ's tools.yml
DLEDGER_ACCESS_KEY        instead of the file
DLEDGER_SECRET_KEY        with it
DLEDGER_SECURITY_TOKEN    with it, where one is needed
DLEDGER_TLS_CA_FILE       the authorities that sign servers; set, connections are TLS
DLEDGER_TLS_CERT_FILE     certificate of this client, where servers ask for one
DLEDGER_TLS_KEY_FILE      its key
========================= ==============================================================
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.route import parse_address_list
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.remoting.access.account_file import parse_credentials
from dledger.remoting.machine import SystemRng, ThreadExecutor, TrioClock
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.tcp import TcpNetwork, client_tls

CREDENTIALS_FILE: Final = "DLEDGER_CREDENTIALS"
ACCESS_KEY: Final = "DLEDGER_ACCESS_KEY"
SECRET_KEY: Final = "DLEDGER_SECRET_KEY"
SECURITY_TOKEN: Final = "DLEDGER_SECURITY_TOKEN"
TLS_CA_FILE: Final = "DLEDGER_TLS_CA_FILE"
TLS_CERT_FILE: Final = "DLEDGER_TLS_CERT_FILE"
TLS_KEY_FILE: Final = "DLEDGER_TLS_KEY_FILE"


def credentials_from(environment: Mapping[str, str]) -> Credentials | None:
    """Return the credentials that the environment names, None when it names none.

    Raises:
        ConfigError: Half of them, or a file that cannot be read; shows no secret.
    """
    path = environment.get(CREDENTIALS_FILE)
    if path:
        try:
            return parse_credentials(path, Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{CREDENTIALS_FILE}: {path}: {error.strerror}") from None
    access_key = environment.get(ACCESS_KEY, "")
    secret_key = environment.get(SECRET_KEY, "")
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        raise ConfigError(f"{ACCESS_KEY} and {SECRET_KEY} go together")
    return Credentials(access_key, secret_key, environment.get(SECURITY_TOKEN) or None)


def tls_from(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS that the environment asks for, None when it asks for none.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    authorities = environment.get(TLS_CA_FILE)
    if not authorities:
        return None
    return client_tls(
        ca_file=authorities,
        cert_file=environment.get(TLS_CERT_FILE) or None,
        key_file=environment.get(TLS_KEY_FILE) or None,
    )


NAMESRV_ADDR = "NAMESRV_ADDR"
"""Environment variable with NameServer addresses, as RocketMQ's clients read it."""


def connect(
    name_servers: str | Iterable[str] | None = None,
    config: ClientConfig | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> ClientInstance:
    """Return a client instance for real use, not yet open: ``async with connect(...) as client``.

    NameServers are taken from the first of: *name_servers*, *config*, ``NAMESRV_ADDR``.
    Credentials and TLS are taken from *config*, else from the variables of `client.connect`.

    Args:
        name_servers: ``host:port`` entries, or one string of them separated by ``;``.
        config: Other settings; address and process id are filled in.
        environment: Instead of the process's environment.
    Raises:
        ConfigError: No NameServer is named; credentials or TLS files cannot be read.
    """
    config = config if config is not None else ClientConfig()
    variables = os.environ if environment is None else environment
    found = tuple(parse_address_list(name_servers or ())) or config.name_servers
    if not found and config.address_server_url is None:
        found = tuple(parse_address_list(variables.get(NAMESRV_ADDR, "")))
    filled = replace(
        config,
        name_servers=found,
        pid=config.pid or os.getpid(),
        client_ip=local_ip() if config.client_ip == "127.0.0.1" else config.client_ip,
        credentials=config.credentials or credentials_from(variables),
        tls=config.tls or tls_from(variables),
    )
    return ClientInstance(
        filled,
        clock=TrioClock(),
        network=TcpNetwork(),
        rng=SystemRng(),
        executor=ThreadExecutor(),
        disk=OsDisk(),
    )


def local_ip() -> str:
    """Return an address of this machine for ids; 127.0.0.1 when it has no name that resolves."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    addresses = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    return str(addresses[0][4][0]).partition("%")[0]
