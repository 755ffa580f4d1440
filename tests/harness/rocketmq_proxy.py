"""RocketMQ's own proxy, in cluster mode, before brokers and NameServers of this project."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from dledger.cli.ports import free_ports, is_free
from tests.harness.foreign_client import java_jars

VERSION = "5.5.0"
START_S = 90.0
"""It loads some thousand classes, and makes a topic at the brokers first."""

LOOK_S = 0.1


class RocketMqProxy:
    """One process, at the same ports each time it is started. Get it from `rocketmq_proxy`."""

    def __init__(self, folder: Path, namesrv: str) -> None:
        self._grpc_port, self._remoting_port = free_ports(2)
        self.address = f"127.0.0.1:{self._grpc_port}"
        """Of the gRPC protocol."""
        self.remoting_address = f"127.0.0.1:{self._remoting_port}"
        """Of the remoting protocol: a NameServer and a broker at once."""
        self.log = folder / "stdout.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "proxyMode": "CLUSTER",
            "namesrvAddr": namesrv,
            "grpcServerPort": self._grpc_port,
            "remotingListenPort": self._remoting_port,
            "localServeAddr": "127.0.0.1",
            "remotingAccessAddr": "127.0.0.1",
            # The defaults are 20 s: how long it sends to a leader of before.
            "topicRouteServiceCacheRefreshSeconds": 1,
            "transactionHeartbeatPeriodSecond": 1,
        }
        (folder / "conf").mkdir(parents=True)
        self._config = folder / "conf" / "rmq-proxy.json"
        self._config.write_text(json.dumps(settings))

    async def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            AssertionError: It ended, or did not serve in time; with the end of what it printed.
        """
        jars = f"{java_jars(VERSION)}/*"
        home = f"-Duser.home={self._folder}"
        command = ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", home, "-cp", jars]
        program = ["org.apache.rocketmq.proxy.ProxyStartup", "-pc", str(self._config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "RMQ_PROXY_HOME": str(self._folder)},
                start_new_session=True,
            )
        with trio.move_on_after(START_S) as waited:
            while is_free(self._grpc_port) or is_free(self._remoting_port):
                if self._process.poll() is not None:
                    break
                await trio.sleep(LOOK_S)
        if waited.cancelled_caught or self._process.poll() is not None:
            raise AssertionError(f"the proxy does not serve: {self.log.read_text()[-3000:]}")

    async def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            await trio.to_thread.run_sync(self._process.wait)


@asynccontextmanager
async def rocketmq_proxy(folder: Path, namesrv: str) -> AsyncIterator[RocketMqProxy]:
    """Run a proxy while the block runs.

    Args:
        folder: Its home, made here; its logs are in it.
    """
    proxy = RocketMqProxy(folder, namesrv)
    try:
        await proxy.start()
        yield proxy
    finally:
        with trio.CancelScope(shield=True):
            await proxy.kill()
