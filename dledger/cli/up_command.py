"""``dledger up``: a local cluster in one command."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from dledger.output import CliError, ExitCode, Output, note, print_json, print_table

if TYPE_CHECKING:
    from dledger.cli.local_cluster import LocalCluster

WATCH_S = 0.5

CONSOLE_PORT = 8180
CONSOLE = "console"
PROXY_PORT = 8081
"""Where clients of the gRPC protocol look first; RocketMQ's."""

SEGMENT_BYTES = 64 << 20
"""Three brokers share one disk and each reserves two segments: the default would take 6 GiB."""


async def up(
    *,
    brokers: Annotated[int, Parameter(help="Members of each group.")] = 3,
    groups: Annotated[int, Parameter(help="Broker groups, each a log of its own.")] = 1,
    folder: Annotated[
        Path | None, Parameter(name=["--dir"], help="Where data and logs are kept.")
    ] = None,
    port: Annotated[
        int | None,
        Parameter(
            help="Port of the NameServer; without it every port is a free one.",
            validator=validators.Number(gte=1, lte=65_535),
        ),
    ] = None,
    proxy: Annotated[
        bool,
        Parameter(
            help="Also run a proxy for clients of RocketMQ's gRPC protocol: at port 8081 if it is"
            " free."
        ),
    ] = False,
    console: Annotated[
        bool,
        Parameter(help="Also serve a web console that allows changes: at port 8180 if it is free."),
    ] = False,
    output: Output = "table",
) -> None:
    """Run a NameServer and broker groups on this machine until Ctrl-C.

    Without --dir everything lies in a new temporary folder, which stays there.
    """
    import tempfile

    import trio

    from dledger.cli.local_cluster import MAX_GROUPS, local_cluster
    from dledger.cli.ports import free_ports, is_free
    from dledger.settings.config import SEGMENT_SIZE

    if not 1 <= brokers <= 5:
        raise CliError("--brokers: from 1 to 5", exit_code=ExitCode.USAGE)
    if not 1 <= groups <= MAX_GROUPS:
        raise CliError(f"--groups: from 1 to {MAX_GROUPS}", exit_code=ExitCode.USAGE)
    where = folder or Path(tempfile.mkdtemp(prefix="dledger-up-"))
    ports = None
    if port is not None:
        if not is_free(port):
            raise CliError(
                f"--port {port}: address already in use",
                next_step="leave --port out, or take another",
            )
        ports = [port, *free_ports(2 * brokers * groups)]
    proxies = []
    if proxy:
        proxies = [PROXY_PORT] if is_free(PROXY_PORT) else free_ports(1)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with local_cluster(
            where,
            brokers=brokers,
            groups=groups,
            ports=ports,
            settings={SEGMENT_SIZE: SEGMENT_BYTES},
            progress=note,
            proxies=proxies,
        ) as cluster:
            if console:
                await _serve_console(cluster)
            await _announce(cluster, output)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, cluster)
                async for _ in signals:
                    note("stopping")
                    nursery.cancel_scope.cancel()
                    break


async def _serve_console(cluster: LocalCluster) -> None:
    """Start a console beside the cluster; it ends with it."""
    from dledger.cli.local_cluster import Node
    from dledger.cli.ports import free_ports, is_free

    port = CONSOLE_PORT if is_free(CONSOLE_PORT) else free_ports(1)[0]
    arguments = ("console", "--namesrv", cluster.namesrv_address, "--port", str(port))
    cluster.proxies[CONSOLE] = Node(
        CONSOLE,
        f"127.0.0.1:{port}",
        (*arguments, "--allow-changes"),
        cluster.folder / f"{CONSOLE}.log",
    )
    await cluster.start(CONSOLE)
    await cluster.wait_proxies()
    note(f"console: http://127.0.0.1:{port}")


async def _announce(cluster: LocalCluster, output: str) -> None:
    leaders = [await cluster.leader(group) for group in cluster.groups]
    rows = [
        {
            "node": node.name,
            "address": node.address,
            "pid": node.pid,
            "group": node.group if node.name in cluster.brokers else None,
            "leads": node.name in leaders,
            "log": str(node.log_path),
        }
        for node in cluster.nodes
    ]
    if output == "json":
        print_json({"namesrv": cluster.namesrv_address, "nodes": rows})
        return
    print_table(
        "",
        ["node", "address", "pid", "group", "leads", "log"],
        [list(row.values()) for row in rows],
    )
    note(f"export NAMESRV_ADDR={cluster.namesrv_address}")
    note("dledger cluster ls; dledger send --topic hello 'a message'; Ctrl-C stops everything")


async def _watch(cluster: LocalCluster) -> None:
    """Print it once when a node ends by itself."""
    import trio

    reported: set[str] = set()
    while True:
        await trio.sleep(WATCH_S)
        for node in cluster.nodes:
            if not node.running and node.name not in reported:
                reported.add(node.name)
                note(f"{node.name} has ended {node.ending}")
