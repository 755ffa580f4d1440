"""The page of a proxy: its calls by name and code, its clients, and whether it is ready."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import grpc
import pytest

from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.metrics import STOPS
from dledger.proxy.server import SERVICE, serving
from tests.harness.metrics_page import MetricsPage

pytestmark = pytest.mark.slow

METADATA = (("x-mq-client-id", "a client"),)
PRODUCER = pb.TelemetryCommand(
    settings=pb.Settings(
        client_type=pb.PRODUCER, publishing=pb.Publishing(topics=[pb.Resource(name="T")])
    )
)


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a page."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def telemetry(channel: grpc.aio.Channel) -> Any:
    """Open a stream of telemetry."""
    return channel.stream_stream(
        f"/{SERVICE}/Telemetry",
        request_serializer=pb.TelemetryCommand.SerializeToString,
        response_deserializer=pb.TelemetryCommand.FromString,
    )(metadata=METADATA)


def test_page_has_the_calls_and_clients_of_a_proxy() -> None:
    (port,) = free_ports(1)

    async def page() -> MetricsPage:
        return MetricsPage.read((await asyncio.to_thread(get, port, "/metrics"))[1])

    async def run() -> None:
        instance = connect("127.0.0.1:1")
        async with serving(instance, ("127.0.0.1", 0), page_at=("127.0.0.1", port)) as listens:
            assert await asyncio.to_thread(get, port, "/readyz") == (200, "ready\n")
            assert (await page()).value("rocketmq_proxy_up") == 1
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listens}") as channel:
                beat = channel.unary_unary(
                    f"/{SERVICE}/Heartbeat",
                    request_serializer=pb.HeartbeatRequest.SerializeToString,
                    response_deserializer=pb.HeartbeatResponse.FromString,
                )
                for _ in range(2):
                    answer = await beat(
                        pb.HeartbeatRequest(client_type=pb.PRODUCER), metadata=METADATA
                    )
                    assert answer.status.code == pb.OK
                stream = telemetry(channel)
                await stream.write(PRODUCER)
                assert (await stream.read()).status.code == pb.OK
                found = await page()
                assert found.value("dledger_proxy_streams") == 1
                assert found.value("dledger_proxy_clients") == 1
                assert found.value("dledger_proxy_open_calls") == 0
                counted = found.of(
                    "rocketmq_rpc_latency_count", "protocol_type", "request_code", "response_code"
                )
                assert counted == {("grpc", "heartbeat", "ok"): 2}
                node = found.of("rocketmq_proxy_up", "node_type", "node_id")
                assert node == {("proxy", f"127.0.0.1:{listens}"): 1}
                stream.cancel()

    asyncio.run(run())


def test_stopping_proxy_is_not_ready(tmp_path: Path) -> None:
    listen, port = free_ports(2)
    command = [
        sys.executable, "-m", "dledger", "proxy", "--namesrv", "127.0.0.1:1",
        "--listen", f"127.0.0.1:{listen}", "--metrics", f"127.0.0.1:{port}",
    ]  # fmt: skip

    async def run(proxy: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                assert await asyncio.to_thread(get, port, "/healthz") == (200, "alive\n")
                break
            except (URLError, ConnectionError):
                assert proxy.poll() is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listen}") as channel:
            # A stream that is open holds the proxy up for its grace.
            stream = telemetry(channel)
            await stream.write(PRODUCER)
            assert (await stream.read()).status.code == pb.OK
            proxy.send_signal(signal.SIGTERM)
            while (await asyncio.to_thread(get, port, "/readyz")) != (503, f"{STOPS}\n"):
                assert proxy.poll() is None, "it stopped before it was seen to stop"
            assert await asyncio.to_thread(get, port, "/healthz") == (200, "alive\n")
            stream.cancel()

    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as proxy:
        try:
            asyncio.run(run(proxy))
            assert proxy.wait(20) == 0
        finally:
            proxy.kill()
