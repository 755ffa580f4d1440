"""``dledger namesrv``: one NameServer daemon."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import structlog
import trio
from cyclopts import App, Parameter

from dledger.namesrv.config import NamesrvConfig
from dledger.output import LogFormOption, LogLevelOption, PrintSettings, begin_log, log_settings
from dledger.remoting.log import LogForm
from dledger.remoting.machine import raise_open_files, share_descriptors
from dledger.remoting.service_manager import ServiceManager
from dledger.settings.schema import ConfigFile, settings_text

app = App(name="namesrv", help="Run one NameServer.", backend="trio")


@app.default
async def namesrv(
    *,
    config: Annotated[
        Path | None,
        Parameter(name=["--config", "-c"], help="TOML file, or a RocketMQ namesrv.conf unchanged."),
    ] = None,
    print_settings: PrintSettings = False,
    listen_host: Annotated[str | None, Parameter(help="Address to listen on.")] = None,
    listen_port: Annotated[
        int | None, Parameter(help="Port to listen on; 0: any free port.")
    ] = None,
    kv_config_path: Annotated[
        str | None, Parameter(help="File of the key-value configuration.")
    ] = None,
    log_level: LogLevelOption = "info",
    log_form: LogFormOption = None,
) -> None:
    """Run one NameServer.

    Settings come from defaults, a file and this command line; the later ones win. Routes live in
    memory: brokers bring them. SIGTERM and Ctrl-C stop it cleanly.
    """
    named = {
        "server.listen_host": listen_host,
        "server.listen_port": listen_port,
        "namesrv.kv_config_path": kv_config_path,
    }
    settings = NamesrvConfig.load(
        [] if config is None else [ConfigFile.read(config)],
        options={path: value for path, value in named.items() if value is not None},
        home=os.environ.get("HOME", ""),
    )
    if print_settings:
        sys.stdout.write(settings_text(settings.settings()))
        return
    await run_daemon(settings, log_level, log_form)


async def run_daemon(config: NamesrvConfig, log_level: str, log_form: LogForm | None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: A certificate or the key-value file cannot be used.
        OSError: The address cannot be bound.
    """
    from dledger.remoting.machine import GarbageCollection, TrioClock

    begin_log(config, log_level, log_form)
    log_settings(config)
    garbage = GarbageCollection(TrioClock())
    manager = ServiceManager(os.environ, os.getpid())
    with garbage.in_charge(), trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope, manager)
            nursery.start_soon(garbage.run)
            nursery.start_soon(manager.keep_watchdog, TrioClock())
            await _serve(_with_descriptors(config), manager)
    structlog.get_logger().info("namesrv_stopped")


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
    server = replace(config.server, max_connections=allowed)
    return replace(config, server=server)


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope, manager: ServiceManager
) -> None:
    async for number in signals:
        manager.stopping()
        structlog.get_logger().info("signal", name=signal.Signals(number).name)
        scope.cancel()
