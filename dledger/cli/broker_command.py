"""``dledger broker``: one broker daemon; its sub-commands drain a broker group and take it back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import trio
from cyclopts import App, Parameter

from dledger.cli.commands import with_admin
from dledger.cli.topic_command import groups_of
from dledger.commitlog.errors import ConfigError
from dledger.output import (
    CliError,
    LogFormOption,
    LogLevelOption,
    Output,
    PrintSettings,
    answer,
    begin_log,
    log_settings,
)
from dledger.remoting.log import LogForm
from dledger.remoting.machine import DescriptorShares, raise_open_files, share_descriptors
from dledger.remoting.seams import Clock, Network
from dledger.remoting.service_manager import ServiceManager
from dledger.settings.config import BrokerConfig, load_config, with_stored_sizes
from dledger.settings.schema import ConfigFile, settings_text

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin

app = App(name="broker", help="Run one broker, a member of its group.", backend="trio")


def parse_options(assignments: Sequence[str], named: dict[str, object]) -> dict[str, object]:
    """Return ``table.name`` to value of what stood on the command line.

    Raises ConfigError: an assignment without ``=``.
    """
    options: dict[str, object] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"command line: --set {assignment}: expected table.name=value")
        options[path.strip()] = value.strip()
    options.update({path: value for path, value in named.items() if value is not None})
    return options


@app.default
async def broker(
    *,
    config: Annotated[
        tuple[Path, ...] | None,
        Parameter(name=["--config", "-c"], help="TOML file, or a RocketMQ broker.conf unchanged."),
    ] = None,
    namesrv: Annotated[
        str | None, Parameter(name=["--namesrv", "-n"], help="NameServers, host:port;host:port.")
    ] = None,
    print_settings: PrintSettings = False,
    self_id: Annotated[str | None, Parameter(help="This node in raft.peers.")] = None,
    listen_port: Annotated[int | None, Parameter(help="Port for clients.")] = None,
    store: Annotated[str | None, Parameter(help="Data folder of this node.")] = None,
    set_: Annotated[
        tuple[str, ...] | None,
        Parameter(name="--set", help="Any setting, table.name=value; may be repeated."),
    ] = None,
    log_level: LogLevelOption = "info",
    log_form: LogFormOption = None,
) -> None:
    """Run one broker, a member of its group.

    Settings come from defaults, TOML files, RocketMQ files, NAMESRV_ADDR and this command line;
    the later ones win. SIGTERM and Ctrl-C stop it cleanly.
    """
    settings = load_config(
        [ConfigFile.read(path) for path in config or ()],
        environment=os.environ,
        options=parse_options(
            set_ or (),
            {
                "broker.namesrv_addr": namesrv,
                "raft.self_id": self_id,
                "server.listen_port": listen_port,
                "store.path_root_dir": store,
            },
        ),
        home=os.environ.get("HOME", ""),
    )
    if print_settings:
        sys.stdout.write(settings_text(settings.settings()))
        return
    await serve_process(settings, log_level, log_form)


async def serve_process(
    config: BrokerConfig, log_level: str, log_form: LogForm | None, *, clock: Clock | None = None
) -> None:
    """Be a broker process until SIGTERM or Ctrl-C."""
    from dledger.broker import World, serve_broker
    from dledger.commitlog.disk import OsDisk
    from dledger.remoting.machine import (
        AdaptiveExecutor,
        GarbageCollection,
        SystemRng,
        TrioClock,
        local_offset_ms,
        memory_bytes,
    )
    from dledger.remoting.tcp import TcpNetwork

    config = with_stored_sizes(config, OsDisk())
    begin_log(config, log_level, log_form, node_id=config.raft.self_id, group=config.raft.group)
    log_settings(config)
    config, shares = _share_descriptors(await _with_addresses(config))
    await check_ports(config, TcpNetwork())
    stop = trio.Event()
    garbage = GarbageCollection(TrioClock())
    manager = ServiceManager(os.environ, os.getpid())
    with garbage.in_charge(), trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, signals, stop, nursery.cancel_scope, manager)
            nursery.start_soon(garbage.run)
            nursery.start_soon(manager.keep_watchdog, TrioClock())
            await serve_broker(
                config,
                World(
                    clock or TrioClock(),
                    SystemRng(),
                    TcpNetwork(),
                    OsDisk(shares.file_descriptors),
                    AdaptiveExecutor(),
                    pid=os.getpid(),
                    memory_bytes=memory_bytes(),
                    utc_offset=local_offset_ms,
                    queue_files_max=shares.queue_files,
                ),
                stop=stop,
                measure_loop=True,
                garbage=garbage,
                task_status=manager,
            )
            nursery.cancel_scope.cancel()
    structlog.get_logger().info("broker_stopped")


async def check_ports(config: BrokerConfig, network: Network) -> None:
    """Try the ports a broker cannot be without, before it reserves space for its log.

    Raises CliError: one of them cannot be listened on; it names the setting.
    """
    own = config.self_peer
    wanted = [("server.listen_port", config.server.listen_host, config.server.listen_port)]
    if len(config.raft.peers) > 1:
        wanted.append(("raft.peers", own.host, config.raft.listen_port or own.port))
    for setting, host, port in wanted:
        try:
            listener = await network.listen(host, port)
        except OSError as error:
            raise CliError(
                f"{setting}: {error.strerror or error}",
                next_step=f"nothing was started: find what listens: ss -ltnp 'sport = :{port}'",
            ) from None
        await listener.aclose()


def _share_descriptors(config: BrokerConfig) -> tuple[BrokerConfig, DescriptorShares]:
    """Share the descriptors that the process may have; return also the shares of files."""
    from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES

    server, open_files = config.server, raise_open_files()
    wanted = server.max_connections + _fast_connections(config, server.max_connections)
    shares = share_descriptors(wanted, MAX_OPEN_FILES, open_files)
    if shares.connections >= wanted:
        return config, shares
    allowed = max(1, shares.connections * server.max_connections // wanted)
    structlog.get_logger().warning(
        "fewer_connections",
        open_files=open_files,
        max_connections=allowed,
        queue_files=shares.queue_files,
        configured=server.max_connections,
        next_step="raise the hard limit of open files (ulimit -Hn) of this process",
    )
    limited = replace(server, max_connections=allowed)
    return replace(config, server=limited), shares


def _fast_connections(config: BrokerConfig, connections: int) -> int:
    from dledger.side_ports import FAST_SHARE

    return connections // FAST_SHARE if config.fast_listen_port else 0


async def _with_addresses(config: BrokerConfig) -> BrokerConfig:
    """Resolve the advertised host once: it becomes part of message ids, as an address.

    Of a name that has addresses of both families, that of IPv4 is taken: all clients know it.

    Raises ConfigError: the name has no address.
    """
    name = config.broker.broker_ip1
    try:
        found = await trio.socket.getaddrinfo(name, None, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"broker.broker_ip1 = {name!r}: no address: {error}") from None
    address = str(min(found, key=lambda one: one[0] != trio.socket.AF_INET)[4][0])
    return replace(config, broker=replace(config.broker, broker_ip1=address))


async def _stop_on_signal(
    signals: AsyncIterator[int], stop: trio.Event, scope: trio.CancelScope, manager: ServiceManager
) -> None:
    """The first signal asks for a clean stop, a second one does not wait for it."""
    log = structlog.get_logger()
    async for number in signals:
        log.info("signal", name=signal.Signals(number).name, again=stop.is_set())
        if stop.is_set():
            scope.cancel()
        manager.stopping()
        stop.set()


# --------------------------------------------------------------------------------- write permission


@app.command(
    name="wipe-write-perm", help="Keep producers away from a broker group; consumers still read it."
)
@with_admin
async def wipe_write_perm(
    admin: Admin,
    broker: Annotated[str, Parameter(help="Name of the broker group.")],
    /,
    *,
    output: Output = "table",
) -> None:
    """Let producers leave a broker group; consumers go on reading what it has.

    Every NameServer gets it. Producers follow when they read the route again, within 30 seconds.
    """
    await _set_write_perm(admin, broker, False, output)


@app.command(name="add-write-perm", help="Let producers send to a broker group again.")
@with_admin
async def add_write_perm(
    admin: Admin,
    broker: Annotated[str, Parameter(help="Name of the broker group.")],
    /,
    *,
    output: Output = "table",
) -> None:
    """Let producers send to a broker group again."""
    await _set_write_perm(admin, broker, True, output)


async def _set_write_perm(admin: Admin, broker: str, is_writable: bool, output: Output) -> None:
    await groups_of(admin, None, [broker])
    counts = await admin.set_write_perm(broker, is_writable)
    what = "take messages" if is_writable else "take no messages any more"
    sentences = [f"{address}: {n} topics of {broker} {what}" for address, n in counts.items()]
    answer(output, {"broker": broker, "topics": counts}, *sentences)
