"""Settings of a proxy: defaults, a file in TOML or properties, the command line.

A later source wins over an earlier one, and every value keeps its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dledger.commitlog.errors import ConfigError, LocalProtocolError
from dledger.remoting.addresses import split_address
from dledger.settings.schema import Config, setting

PORT_MAX: Final = 65_535


@dataclass(kw_only=True, slots=True)
class ServerTable:
    """``[server]``: the port that clients talk to."""

    listen: str = setting(
        "127.0.0.1:8081", "host:port to listen on; port 0 takes a free one.", min_length=1
    )
    advertised: str = setting("", "host:port where clients reach this proxy; empty: as listen.")
    tls_cert_file: str = setting("", "PEM certificate chain; empty: plain.")
    tls_key_file: str = setting("", "PEM private key.")
    tls_ca_file: str = setting(
        "", "PEM authorities a client's certificate must have; empty: none is asked for."
    )

    acl_enable: bool = setting(
        False, "Every call must be signed by an account of acl_file that may make it.", "aclEnable"
    )
    acl_file: str = setting("", "Accounts, in TOML or as RocketMQ's plain_acl.yml.", "aclFile")


@dataclass(kw_only=True, slots=True)
class ProxyTable:
    """``[proxy]``: what stands behind it."""

    namesrv_addr: str = setting("", "NameServers, host:port each, separated by ';'.", "namesrvAddr")


@dataclass(kw_only=True, slots=True)
class MetricsTable:
    """``[metrics]``: a page for Prometheus, and for probes."""

    listen_port: int = setting(
        0,
        "Port that answers GET /metrics, /healthz and /readyz; 0: none. One that is taken is"
        " left out with a warning.",
        "metricsPromExporterPort",
        within=(0, PORT_MAX),
    )
    listen_host: str = setting(
        "127.0.0.1", "Address to bind for it; there is no access control there.", min_length=1
    )


@dataclass(frozen=True, slots=True)
class ProxyConfig(Config):
    """All settings of a proxy."""

    server: ServerTable = field(default_factory=ServerTable)
    proxy: ProxyTable = field(default_factory=ProxyTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        server = self.server
        for path, text in (("listen", server.listen), ("advertised", server.advertised)):
            if text:
                try:
                    address_of(text)
                except ConfigError as error:
                    yield f"server.{path}", str(error)
        if bool(server.tls_cert_file) != bool(server.tls_key_file):
            yield "server.tls_cert_file", "goes with server.tls_key_file"
        if server.acl_enable and not server.acl_file:
            yield "server.acl_enable", "needs server.acl_file, the accounts"
        if server.tls_ca_file and not server.tls_cert_file:
            yield "server.tls_ca_file", "needs server.tls_cert_file"


def address_of(text: str) -> tuple[str, int]:
    """Return host and port. Raises ConfigError: it is no ``host:port``."""
    try:
        return split_address(text)
    except LocalProtocolError:
        raise ConfigError(f"{text!r} is no host:port") from None
