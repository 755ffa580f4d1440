"""``dledger namesrv``: one NameServer daemon."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import structlog
import trio
from cyclopts import App, Parameter
from msgspec import structs

from dledger.commitlog.errors import ConfigError
from dledger.namesrv.config import NamesrvConfig, load_config
from dledger.remoting.log import configure_logs
from dledger.remoting.machine import raise_open_files, share_descriptors
from dledger.remoting.seams import ServerTls
from dledger.remoting.service_manager import ServiceManager
from dledger.remoting.settings import ConfigFile, settings_text

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_FAILED = 1

app = App(name="namesrv", help="Run one NameServer.", backend="trio")


@app.default
async def namesrv(
    *,
    config: Annotated[
        Path | None,
        Parameter(name=["--config", "-c"], help="TOML file, or a RocketMQ namesrv.conf unchanged."),
    ] = None,
    print_settings: Annotated[
        bool,
        Parameter(
            name=["--print-settings", "-p"],
            negative="",
            help="Print every setting with its source and exit.",
        ),
    ] = False,
    listen_host: Annotated[str | None, Parameter(help="Address to listen on.")] = None,
    listen_port: Annotated[
        int | None, Parameter(help="Port to listen on; 0: any free port.")
    ] = None,
    kv_config_path: Annotated[
        str | None, Parameter(help="File of the key-value configuration.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Parameter(help="Least level that is logged.")
    ] = "info",
    log_form: Annotated[
        Literal["json", "text"] | None,
        Parameter(help="json, or text for people; text on a terminal."),
    ] = None,
) -> int:
    """Run one NameServer.

    Settings come from defaults, a file and this command line; the later ones win. Routes live in
    memory: brokers bring them. SIGTERM and Ctrl-C stop it cleanly.
    """
    try:
        named = {
            "server.listen_host": listen_host,
            "server.listen_port": listen_port,
            "namesrv.kv_config_path": kv_config_path,
        }
        settings = load_config(
            [] if config is None else [ConfigFile.read(config)],
            options={path: value for path, value in named.items() if value is not None},
            home=os.environ.get("HOME", ""),
        )
        if print_settings:
            sys.stdout.write(settings_text(settings.settings()))
            return EXIT_OK
        return await run_daemon(settings, log_level, log_form)
    except ConfigError as error:
        return _fail(error.mistakes, EXIT_CONFIG)
    except OSError as error:
        return _fail((str(error),), EXIT_FAILED)


async def run_daemon(
    config: NamesrvConfig, log_level: str, log_form: Literal["json", "text"] | None
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        ConfigError: A certificate or the key-value file cannot be used.
        OSError: The address cannot be bound.
    """
    from dledger.remoting.machine import GarbageCollection, TrioClock

    configure_logs(form=log_form or ("text" if sys.stderr.isatty() else "json"), level=log_level)
    log = structlog.get_logger()
    for warning in config.warnings:
        log.warning("config_warning", text=warning)
    log.info(
        "settings",
        **{path: f"{value} ({source})" for path, value, source in config.changed_settings()},
    )
    garbage = GarbageCollection(TrioClock())
    manager = ServiceManager(os.environ, os.getpid())
    with garbage.in_charge(), trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        failed: ConfigError | OSError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope, manager)
            nursery.start_soon(garbage.run)
            nursery.start_soon(manager.keep_watchdog, TrioClock())
            try:
                await _serve(_with_descriptors(config), manager)
            except (ConfigError, OSError) as error:
                failed = error
                nursery.cancel_scope.cancel()
        if failed is not None:  # out here it is not wrapped in a group
            raise failed
    log.info("namesrv_stopped")
    return EXIT_OK


def listener_tls(config: NamesrvConfig) -> ServerTls:
    """Return the listener's TLS from the files that *config* names.

    Raises ConfigError: a file is missing or not what it should be.
    """
    from dledger.remoting.tcp import server_tls

    server = config.server
    return server_tls(
        server.tls_mode,
        cert_file=server.tls_cert_file or None,
        key_file=server.tls_key_file or None,
        client_ca_file=server.tls_ca_file or None,
    )


async def _serve(config: NamesrvConfig, manager: ServiceManager) -> None:
    from dledger.commitlog.disk import OsDisk
    from dledger.namesrv.server import serve_namesrv
    from dledger.remoting.machine import (
        AdaptiveExecutor,
        SystemRng,
        TrioClock,
        give_freed_memory_back,
        memory_bytes,
    )
    from dledger.remoting.tcp import TcpNetwork

    give_freed_memory_back()
    await serve_namesrv(
        config,
        clock=TrioClock(),
        rng=SystemRng(),
        network=TcpNetwork(),
        disk=OsDisk(),
        tls=listener_tls(config),
        executor=AdaptiveExecutor(),
        memory_bytes=memory_bytes(),
        task_status=manager,
    )


def _with_descriptors(config: NamesrvConfig) -> NamesrvConfig:
    """Take fewer connections where the limit of open files is lower than what is asked for."""
    open_files = raise_open_files()
    wanted = config.server.max_connections
    allowed = share_descriptors(wanted, 0, open_files).connections
    if allowed >= wanted:
        return config
    structlog.get_logger().warning(
        "fewer_connections",
        open_files=open_files,
        max_connections=allowed,
        configured=wanted,
        next_step="raise the hard limit of open files (ulimit -Hn) of this process",
    )
    server = structs.replace(config.server, max_connections=allowed)
    return replace(config, server=server)


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope, manager: ServiceManager
) -> None:
    async for number in signals:
        manager.stopping()
        structlog.get_logger().info("signal", name=signal.Signals(number).name)
        scope.cancel()


def _fail(messages: Iterable[str], status: int) -> int:
    for message in messages:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return status
