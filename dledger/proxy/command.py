"""``dledger proxy``: one proxy daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import grpc
import structlog
from cyclopts import App, Parameter

from dledger.client.connect import connect
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.output import LogFormOption, LogLevelOption, PrintSettings, begin_log
from dledger.proxy.config import ProxyConfig, address_of
from dledger.proxy.server import serving
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.addresses import join_address
from dledger.remoting.machine import give_freed_memory_back
from dledger.settings.schema import ConfigFile, settings_text

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
