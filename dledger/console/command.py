"""``dledger console`` and ``dledger-console``: serve the web console until Ctrl-C."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import hypercorn.trio
import trio
from cyclopts import Parameter, validators
from hypercorn.config import Config

from dledger.client.connect import connect
from dledger.commitlog.errors import ConfigError
from dledger.console.app import make_app
from dledger.console.console import Console, ConsoleSettings
from dledger.remoting.addresses import bracketed, is_loopback, join_address
from dledger.remoting.log import configure_logs
from dledger.remoting.protocol.topic_names import TRACE_TOPIC

DEFAULT_PORT = 8180
GRACE_S = 1.0
"""Requests that are open when the console stops get this long."""
MAX_INCOMPLETE_BYTES = 32 << 10
"""Of a request's head."""


async def console(
    *,
    namesrv: Annotated[
        str,
        Parameter(
            name=["--namesrv", "-n"],
            env_var="NAMESRV_ADDR",
            help="NameServers, host:port;host:port.",
        ),
    ] = "127.0.0.1:9876",
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        Parameter(
            help="Port to listen on; 0: a free one.", validator=validators.Number(gte=0, lte=65_535)
        ),
    ] = DEFAULT_PORT,
    host_name: Annotated[
        tuple[str, ...], Parameter(help="Name under which browsers reach it; may be repeated.")
    ] = (),
    allow_changes: Annotated[
        bool, Parameter(help="Let people change the cluster; without it pages only show.")
    ] = False,
    trace_topic: Annotated[str, Parameter(help="Where clients send message trace.")] = TRACE_TOPIC,
    tls_cert_file: Annotated[
        Path | None, Parameter(help="Certificate: browsers then use https.")
    ] = None,
    tls_key_file: Annotated[Path | None, Parameter(help="Its key.")] = None,
    plain_http: Annotated[
        bool,
        Parameter(
            negative="",
            help="Serve http at an address of a network: that of a container whose port is"
            " published to its own machine alone, or that only a proxy with https reaches.",
        ),
    ] = False,
) -> int:
    """Serve a web console of a cluster until Ctrl-C.

    It only shows, unless --allow-changes is given. Every program that reaches its port sees what
    the console may read: it listens on this machine alone, unless --host names another address.
    """
    check_binding(host, tls_cert_file, tls_key_file, plain_http=plain_http)
    configure_logs(form="text")
    config = Config()
    config.bind = [join_address(host, port)]
    config.graceful_timeout = GRACE_S
    config.h11_max_incomplete_size = MAX_INCOMPLETE_BYTES
    config.include_server_header = False
    config.errorlog = None
    if tls_cert_file is not None:
        config.certfile = str(tls_cert_file)
        config.keyfile = str(tls_key_file)
    settings = ConsoleSettings(allow_changes, tls_cert_file is not None, trace_topic)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(serve, namesrv, settings, config, (bracketed(host), *host_name))
            )
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break
    return 0


def check_binding(
    host: str, cert_file: Path | None, key_file: Path | None, *, plain_http: bool = False
) -> None:
    """Refuse what would put a console on a network without protection.

    Raises ConfigError: an address of a network without TLS, or half of the files for it.
    """
    if (cert_file is None) != (key_file is None):
        raise ConfigError("--tls-cert-file and --tls-key-file go together")
    if not is_loopback(host) and cert_file is None and not plain_http:
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --tls-cert-file and"
            " --tls-key-file, or let a proxy with https and a sign-in stand before a console on"
            " 127.0.0.1; --plain-http where nothing else reaches that network"
        )


async def serve(
    namesrv: str,
    settings: ConsoleSettings,
    config: Config,
    hosts: tuple[str, ...],
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a console until cancelled; started when it can be reached, with its address.

    Cancellation: Requests that are open are given up.
    """
    async with connect(namesrv) as client, trio.open_nursery() as nursery:
        console = Console(client, lambda other: connect(namesrv, other), settings)
        # The two libraries type the same interface differently.
        app = cast(Any, make_app(console, hosts))
        bound = await nursery.start(partial(hypercorn.trio.serve, app, config, mode="asgi"))
        print(f"console: {bound[0]}", flush=True)
        task_status.started(bound[0])
        await trio.sleep_forever()
