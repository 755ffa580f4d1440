"""The real world for a client: sockets, clock, randomness, NAMESRV_ADDR of the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace

from client.access import credentials_from, tls_from
from client.core.client_instance import ClientConfig, ClientInstance
from client.core.route import parse_address_list
from commitlog.disk import OsDisk
from remoting.edge import SystemRng, TcpNetwork, ThreadExecutor, TrioClock

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
    Credentials and TLS are taken from *config*, else from the variables of `client.access`.

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
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return found
