"""Settings of a proxy: defaults, a file in TOML or properties, the command line.

A later source wins over an earlier one, and every value keeps its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from msgspec import Struct

from dledger.commitlog.errors import ConfigError
from dledger.remoting.settings import Config, ConfigFile, Schema, SettingsReader, refuse, setting

PORT_MAX: Final = 65_535


class ServerTable(Struct, frozen=True, kw_only=True):
    """``[server]``: the port that clients talk to."""

    listen: Annotated[
        str, setting("host:port to listen on; port 0 takes a free one.", min_length=1)
    ] = "127.0.0.1:8081"
    advertised: Annotated[
        str,
        setting("host:port where clients reach this proxy; empty: as listen."),
    ] = ""
    tls_cert_file: Annotated[str, setting("PEM certificate chain; empty: plain.")] = ""
    tls_key_file: Annotated[str, setting("PEM private key.")] = ""
    tls_ca_file: Annotated[
        str, setting("PEM authorities a client's certificate must have; empty: none is asked for.")
    ] = ""

    acl_enable: Annotated[
        bool,
        setting(
            "Every call must be signed by an account of acl_file that may make it.", "aclEnable"
        ),
    ] = False
    acl_file: Annotated[
        str, setting("Accounts, in TOML or as RocketMQ's plain_acl.yml.", "aclFile")
    ] = ""


class ProxyTable(Struct, frozen=True, kw_only=True):
    """``[proxy]``: what stands behind it."""

    namesrv_addr: Annotated[
        str, setting("NameServers, host:port each, separated by ';'.", "namesrvAddr")
    ] = ""


class MetricsTable(Struct, frozen=True, kw_only=True):
    """``[metrics]``: a page for Prometheus, and for probes."""

    listen_port: Annotated[
        int,
        setting(
            "Port that answers GET /metrics, /healthz and /readyz; 0: none. One that is taken is"
            " left out with a warning.",
            "metricsPromExporterPort",
            ge=0,
            le=PORT_MAX,
        ),
    ] = 0
    listen_host: Annotated[
        str, setting("Address to bind for it; there is no access control there.", min_length=1)
    ] = "127.0.0.1"


SCHEMA: Final = Schema({"server": ServerTable, "proxy": ProxyTable, "metrics": MetricsTable})


@dataclass(frozen=True, slots=True)
class ProxyConfig(Config):
    """All settings of a proxy."""

    schema: ClassVar[Schema] = SCHEMA

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
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"{text!r} is no host:port")
    return host, int(port)


def load_config(
    files: Iterable[ConfigFile] = (), *, options: Mapping[str, object] | None = None
) -> ProxyConfig:
    """Return the settings that defaults, files and options amount to.

    Raises ConfigError: unknown settings, bad values, or settings that contradict each other: one
    line for each.
    """
    reader = SettingsReader(SCHEMA, ignored={})
    reader.read_files(files)
    reader.read_options(options or {})
    refuse(reader.mistakes)
    config = ProxyConfig(
        **reader.tables(),  # type: ignore[arg-type]  # each is of its own type
        sources=reader.sources,
        warnings=reader.warnings,
    )
    refuse(config.contradictions(reader.places))
    return config
