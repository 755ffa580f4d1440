"""Real sockets and TLS."""

import errno
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
import trustme

from dledger.commitlog.errors import ConfigError
from dledger.remoting.client import RemotingClient
from dledger.remoting.errors import ConnectFailedError, RemotingError
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import request, response_to
from dledger.remoting.seams import Stream, TlsMode
from dledger.remoting.server import RemotingServer
from dledger.remoting.tcp import TcpNetwork, client_tls, server_tls

pytestmark = pytest.mark.real_time

ECHO = 900


async def test_listener_waits_out_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    network = TcpNetwork()
    listener = await network.listen("127.0.0.1", 0)
    real_accept = trio.SocketListener.accept
    failures = [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE]

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        if failures:
            raise OSError(failures.pop(0), "no")
        return await real_accept(self)

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    async with trio.open_nursery() as nursery:

        async def knock() -> None:
            stream = await network.connect(*listener.address, timeout_s=5)
            await stream.receive_some(1)
            await stream.aclose()

        nursery.start_soon(knock)
        accepted = await listener.accept()
        assert failures == []
        assert accepted.local_address == listener.address
        await accepted.aclose()
    await listener.aclose()


async def test_listener_that_cannot_accept_logs_it_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    listener = await TcpNetwork().listen("127.0.0.1", 0)
    failures = [errno.EMFILE] * 700 + [errno.EIO, errno.EINVAL]

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if failures:
            raise OSError(failures.pop(0), "no")
        raise trio.ClosedResourceError

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    with structlog.testing.capture_logs() as lines, pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    await listener.aclose()
    assert failures == []
    said = [line for line in lines if line["event"] == "accept_waits"]
    assert [line["times"] for line in said] == [1, 600]
    assert said[0]["address"] == listener.address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_refused_connection_names_its_reason(host: str) -> None:
    listener = await TcpNetwork().listen(host, 0)
    await listener.aclose()
    with pytest.raises(ConnectionRefusedError, match=r"^\[Errno 111\] Connection refused$"):
        await TcpNetwork().connect(host, listener.address[1], timeout_s=60)


async def test_connecting_gives_up_in_time() -> None:
    with pytest.raises(OSError):  # refused, unreachable or timed out: any will do
        await TcpNetwork().connect("127.0.0.1", 1, timeout_s=0.2)


# ---------------------------------------------------------------------------------- TLS


class Certificates:
    """A certificate authority and what it signed, as files."""

    def __init__(self, folder: Path) -> None:
        ca = trustme.CA()
        issued = ca.issue_cert("127.0.0.1")
        self.ca = str(folder / "ca.pem")
        self.cert = str(folder / "cert.pem")
        self.key = str(folder / "key.pem")
        ca.cert_pem.write_to_path(self.ca)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        issued.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


async def serve(nursery: trio.Nursery, mode: TlsMode, certificates: Certificates | None) -> str:
    table = ProcessorTable()
    table.register(ECHO, lambda _, a: response_to(a, 0, None, {}, a.body), Limiter("test", 10))
    tls = server_tls(
        mode,
        cert_file=certificates.cert if certificates else None,
        key_file=certificates.key if certificates else None,
    )
    server = RemotingServer(TcpNetwork(), table, tls=tls)
    host, port = await nursery.start(server.serve, "127.0.0.1", 0)
    return f"{host}:{port}"


async def echo(
    nursery: trio.Nursery, address: str, tls: ssl.SSLContext | None, body: bytes = b"hello"
) -> bytes:
    client = RemotingClient(nursery, TcpNetwork(), tls=tls)
    return bytes((await client.invoke(address, request(ECHO, {}, body))).body)


async def test_permissive_serves_plain_and_tls(
    nursery: trio.Nursery, certificates: Certificates
) -> None:
    address = await serve(nursery, "permissive", certificates)
    assert await echo(nursery, address, None) == b"hello"
    body = bytes(1_000_000)
    assert await echo(nursery, address, client_tls(ca_file=certificates.ca), body) == body


async def test_enforcing_refuses_plain(nursery: trio.Nursery, certificates: Certificates) -> None:
    address = await serve(nursery, "enforcing", certificates)
    assert await echo(nursery, address, client_tls(ca_file=certificates.ca)) == b"hello"
    with pytest.raises(RemotingError):
        await echo(nursery, address, None)


@pytest.mark.parametrize("mode", ["disabled", "permissive"])
async def test_server_without_certificate_speaks_plain_only(
    nursery: trio.Nursery, certificates: Certificates, mode: Any
) -> None:
    address = await serve(nursery, mode, None)
    assert await echo(nursery, address, None) == b"hello"
    with pytest.raises(ConnectFailedError, match="TLS handshake"):
        await echo(nursery, address, client_tls(ca_file=certificates.ca))


async def test_tls_client_checks_the_name_of_its_server(
    nursery: trio.Nursery, certificates: Certificates
) -> None:
    address = await serve(nursery, "permissive", certificates)
    with pytest.raises(ConnectFailedError, match="verify failed"):
        await echo(nursery, address, client_tls())
    assert await echo(nursery, address, client_tls(verify=False)) == b"hello"


def test_missing_files_are_configuration_errors(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        server_tls("permissive", cert_file=missing, key_file=missing)
    with pytest.raises(ConfigError, match=r"none\.pem"):
        client_tls(ca_file=missing)
    with pytest.raises(ConfigError, match="enforcing"):
        server_tls("enforcing", cert_file=None, key_file=None)


async def _connected() -> tuple[Stream, Stream]:
    network = TcpNetwork()
    listener = await network.listen("127.0.0.1", 0)
    ours = await network.connect(*listener.address, timeout_s=5)
    theirs = await listener.accept()
    await listener.aclose()
    return ours, theirs


async def test_stream_that_is_reset_raises_broken() -> None:
    ours, theirs = await _connected()
    await ours.send_all(b"first")
    assert bytes(await theirs.receive_some(64)) == b"first"
    await theirs.send_all(b"unread")
    await trio.testing.wait_all_tasks_blocked()
    await ours.aclose()  # with bytes that were not read: a reset
    with pytest.raises(trio.BrokenResourceError):
        await theirs.receive_some(64)
    await theirs.aclose()


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
async def test_a_name_that_is_none_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {re.escape(host)}:0: "):
        await TcpNetwork().listen(host, 0)


async def read_to_end(stream: Stream) -> bytes:
    data = b""
    while chunk := await stream.receive_some(16):
        data += bytes(chunk)
    return data


ACCEPTS = """
import os, signal, sys, trio
from dledger.remoting.tcp import TcpNetwork

async def main():
    listener = await TcpNetwork().listen("127.0.0.1", 0)
    print(listener.address[1], flush=True)
    accepted = await listener.accept()
    await accepted.receive_some(1)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await accepted.send_all(b"goodbye")
    if sys.argv[1] == "reset":
        accepted.reset_at_close()
    await accepted.aclose()

trio.run(main)
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
@pytest.mark.parametrize("end", ["killed", "reset", "orderly"])
async def test_accepted_connection_is_reset_by_a_kill_or_on_purpose(end: str) -> None:
    ran = [sys.executable, "-c", ACCEPTS, end]
    process = await trio.lowlevel.open_process(ran, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = int(await process.stdout.receive_some(16))
    with trio.fail_after(60):
        stream = await TcpNetwork().connect("127.0.0.1", port, timeout_s=60)
        await stream.send_all(b".")
        if end != "orderly":
            with pytest.raises(trio.BrokenResourceError, match="reset"):
                await read_to_end(stream)
        else:
            assert await read_to_end(stream) == b"goodbye"
        await stream.aclose()
        await process.wait()
