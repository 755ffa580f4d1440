"""``dledger proxy``: one proxy daemon, and its settings.

A later source of a setting wins over an earlier one, and every value keeps its source.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import grpc
import structlog
from cyclopts import App, Parameter

from dledger.client.connect import connect
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError, LocalProtocolError
from dledger.output import LogFormOption, LogLevelOption, PrintSettings, begin_log
from dledger.proxy.server import serving
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.addresses import join_address, split_address
from dledger.remoting.machine import give_freed_memory_back
from dledger.settings.schema import Config, ConfigFile, setting, settings_text

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


app = App(name="proxy", help="Run one proxy for clients of RocketMQ's gRPC protocol.")


@app.default
def proxy(
    *,
    namesrv: Annotated[
        str | None,
        Parameter(name=["--namesrv", "-n"], help="NameServers, host:port each; or NAMESRV_ADDR."),
    ] = None,
    listen: Annotated[str | None, Parameter(help="host:port to listen on.")] = None,
    advertised: Annotated[
        str | None, Parameter(help="host:port where clients reach this proxy.")
    ] = None,
    metrics: Annotated[
        str | None, Parameter(help="host:port for Prometheus and for probes.")
    ] = None,
    config: Annotated[
        Path | None, Parameter(name=["--config", "-c"], help="TOML file with settings.")
    ] = None,
    print_settings: PrintSettings = False,
    log_level: LogLevelOption = "info",
    log_form: LogFormOption = None,
) -> None:
    """Run one proxy: gRPC from clients, remoting to brokers.

    It keeps nothing that outlives a request: run as many as you like, and let any of them end.
    Credentials and TLS towards brokers come from the environment, as for every client. SIGTERM and
    Ctrl-C stop it cleanly.
    """
    named: dict[str, object] = {
        "proxy.namesrv_addr": namesrv,
        "server.listen": listen,
        "server.advertised": advertised,
    }
    if metrics is not None:
        named["metrics.listen_host"], named["metrics.listen_port"] = address_of(metrics)
    settings = ProxyConfig.load(
        [] if config is None else [ConfigFile.read(config)],
        options={path: value for path, value in named.items() if value is not None},
    )
    if print_settings:
        sys.stdout.write(settings_text(settings.settings()))
        return
    begin_log(settings, log_level, log_form)
    asyncio.run(run_daemon(settings))


async def run_daemon(config: ProxyConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: No NameServer is named, an address cannot be bound, a certificate not be used.
    """
    give_freed_memory_back()
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = config.server
    advertised = address_of(server.advertised) if server.advertised else None
    listen = address_of(server.listen)
    instance = connect(config.proxy.namesrv_addr or None, environment=os.environ)
    accounts = AccountStore(OsDisk(), server.acl_file) if server.acl_enable else None
    metrics = config.metrics
    async with serving(
        instance,
        listen,
        advertised=advertised,
        tls=tls_of(config),
        accounts=accounts,
        page_at=(metrics.listen_host, metrics.listen_port) if metrics.listen_port else None,
    ) as port:
        log.info(
            "proxy_started",
            listen=join_address(listen[0], port),
            namesrv=instance.config.name_servers,
        )
        await stop.wait()
    log.info("proxy_stopped")


def tls_of(config: ProxyConfig) -> grpc.ServerCredentials | None:
    """Return the TLS of the port; None: plain. Raises ConfigError: a file cannot be read."""
    server = config.server
    if not server.tls_cert_file:
        return None
    files = [server.tls_key_file, server.tls_cert_file, server.tls_ca_file]
    try:
        key, chain, authorities = [Path(each).read_bytes() if each else None for each in files]
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=authorities, require_client_auth=authorities is not None
    )
