"""The page of a proxy: its calls by name and code, its clients, and whether it is ready.

Calls that come to a proxy at once are all answered.
A client whose network fails without notice: its streams end all the same.
"""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import grpc
import pytest

from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import server
from dledger.proxy.metrics import STOPS
from dledger.proxy.server import OPTIONS, SERVICE, serving
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


BURST: Final = 1_200
"""More than gRPC takes by default before the program has begun them."""


async def answer(request: bytes, _context: Any) -> bytes:
    return request


def test_no_call_of_a_burst_is_dropped() -> None:
    """Consumers of a whole site call at once when another proxy has ended."""
    codes: Counter[str] = Counter()

    async def serve() -> None:
        # gRPC cancels what has waited for 30 s: a busy machine may take that long.
        waits = ("grpc.server_max_unrequested_time_in_server", 600)
        server = grpc.aio.server(options=[*OPTIONS, waits])
        handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/s/Call")
            # Nothing of the server runs meanwhile but gRPC's own threads.
            calls = [call.future(b"x", timeout=60, wait_for_ready=True) for _ in range(BURST)]
            for each in calls:
                error = await asyncio.to_thread(each.exception)
                codes["OK" if error is None else error.code().name] += 1
        await server.stop(None)

    asyncio.run(serve())
    assert codes == {"OK": BURST}


SETTINGS = pb.TelemetryCommand(
    settings=pb.Settings(
        client_type=pb.PRODUCER, publishing=pb.Publishing(topics=[pb.Resource(name="T")])
    )
)


class Cable:
    """Carries the bytes of one connection, until it is cut: neither end gets a word of that."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = False
        self.ended = asyncio.Event()
        """Set when the proxy has ended the connection."""

    def cut(self) -> None:
        self._is_cut = True

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, asyncio.Event()),
                self._pump(far_reader, writer, self.ended),
            )
        finally:
            for end in (far_writer, writer):
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self._is_cut:
                    writer.write(data)
        ended.set()


def test_stream_of_a_silent_host_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    quick: dict[str, Any] = dict(server.OPTIONS)
    times = ["grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"]
    assert all(quick[name] <= 20_000 for name in times)
    quick |= dict.fromkeys(times, 300)
    monkeypatch.setattr(server, "OPTIONS", tuple(quick.items()))

    async def run() -> None:
        instance = connect("127.0.0.1:1")
        async with serving(instance, ("127.0.0.1", 0)) as port:
            cable = Cable(port)
            relay = await asyncio.start_server(cable.carry, "127.0.0.1", 0)
            host, relay_port = relay.sockets[0].getsockname()[:2]
            async with grpc.aio.insecure_channel(f"{host}:{relay_port}") as channel:
                call = channel.stream_stream(
                    f"/{SERVICE}/Telemetry",
                    request_serializer=pb.TelemetryCommand.SerializeToString,
                    response_deserializer=pb.TelemetryCommand.FromString,
                )(metadata=METADATA)
                await call.write(SETTINGS)
                assert (await call.read()).status.code == pb.OK
                cable.cut()
                await asyncio.wait_for(cable.ended.wait(), 20)
                call.cancel()
            relay.close()

    asyncio.run(run())
