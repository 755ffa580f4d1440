"""A client whose network fails without notice: its streams end all the same."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import server
from dledger.proxy.server import SERVICE, serving

pytestmark = pytest.mark.slow

METADATA = (("x-mq-client-id", "a client"),)
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
