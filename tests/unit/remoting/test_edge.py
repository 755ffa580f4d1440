"""The real clock, executor, sockets and TLS."""

from __future__ import annotations

import ctypes
import errno
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
import trustme

from commitlog.errors import ConfigError
from remoting.client import RemotingClient
from remoting.edge import (
    RUNS_AFTER_STALL,
    AdaptiveExecutor,
    SystemRng,
    TcpNetwork,
    TrioClock,
    client_tls,
    server_tls,
)
from remoting.errors import ConnectFailedError, RemotingError
from remoting.processor import Limiter, ProcessorTable
from remoting.protocol.command import request, response_to
from remoting.seams import TlsMode
from remoting.server import RemotingServer

ECHO = 900


async def test_clock_sleeps_on_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    clock = TrioClock()
    before = clock.monotonic()
    await clock.sleep(1000)
    assert clock.monotonic() - before == pytest.approx(1000)
    assert abs(clock.wall_ms() - time.time() * 1000) < 60_000


def test_rng_gives_what_was_asked_for() -> None:
    rng = SystemRng()
    assert len(rng.randbytes(17)) == 17
    assert 0 <= rng.random() < 1
    assert {rng.randrange(2) for _ in range(200)} == {0, 1}


class Measured:
    """Work that takes as long as it says, by the clock the executor reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.where: list[int] = []
        monkeypatch.setattr("remoting.edge.time.perf_counter", lambda: self.now)

    def taking(self, seconds: float) -> Callable[[], str]:
        def work() -> str:
            self.where.append(threading.get_ident())
            self.now += seconds
            return "done"

        return work


async def test_cheap_work_moves_inline_and_slow_work_to_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    here = threading.get_ident()
    assert not executor.runs_inline("flush")
    assert await executor.run(work.taking(0), kind="flush") == "done"
    assert executor.runs_inline("flush")
    await executor.run(work.taking(0), kind="flush")
    await executor.run(work.taking(0.15), kind="flush")
    assert not executor.runs_inline("flush")
    await executor.run(work.taking(0), kind="flush")
    assert [ident == here for ident in work.where] == [False, True, True, False]


async def test_work_that_becomes_cheap_again_comes_back_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    await executor.run(work.taking(0.03), kind="flush")
    assert not executor.runs_inline("flush")
    for _ in range(10):
        await executor.run(work.taking(0), kind="flush")
    assert executor.runs_inline("flush")
    assert work.where[-1] == threading.get_ident()


async def test_slow_work_is_tried_inline_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, under load, all work looks slow; only a trial inline shows that it is not."""
    now = 0.0
    monkeypatch.setattr("remoting.edge.time.perf_counter", lambda: now)
    executor = AdaptiveExecutor(inline_limit_s=0.001)
    here = threading.get_ident()
    where: list[str] = []

    def work() -> None:
        nonlocal now
        inline = threading.get_ident() == here
        where.append("i" if inline else "t")
        now += inline_s if inline else 0.005

    inline_s = 0.004
    for _ in range(60):
        await executor.run(work, kind="flush")
    assert "".join(where) == "ti" + "t" * 32 + "i" + "t" * 25
    where.clear()
    inline_s = 0.0001
    for _ in range(80):
        await executor.run(work, kind="flush")
    assert "".join(where).endswith("i" * 10)


async def test_work_that_held_up_the_loop_stays_in_threads_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor()
    for seconds in (0, 0, 0.1):
        await executor.run(work.taking(seconds), kind="flush")
    here = threading.get_ident()
    assert [ident == here for ident in work.where] == [False, True, True]
    for _ in range(RUNS_AFTER_STALL + 1):
        await executor.run(work.taking(0), kind="flush")
    inline = [ident == here for ident in work.where[3:]]
    assert inline == [False] * RUNS_AFTER_STALL + [True]


async def test_nothing_runs_inline_beside_work_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor()
    await executor.run(work.taking(0), kind="flush")
    assert executor.runs_inline("flush")
    begun, end = threading.Event(), threading.Event()

    def checkpoint() -> None:
        begun.set()
        end.wait(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(executor.run, checkpoint, kind="checkpoint"))
        await trio.to_thread.run_sync(begun.wait)
        assert not executor.runs_inline("flush")
        await executor.run(work.taking(0), kind="flush")
        end.set()
    assert work.where[-1] != threading.get_ident()
    assert executor.runs_inline("flush")


async def test_very_slow_work_is_never_tried_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("remoting.edge.time.perf_counter", lambda: now)
    executor = AdaptiveExecutor()
    inline: list[bool] = []
    here = threading.get_ident()

    def work() -> None:
        nonlocal now
        inline.append(threading.get_ident() == here)
        now += 0.1

    for _ in range(100):
        await executor.run(work, kind="reserve")
    assert not any(inline)


async def test_kinds_are_measured_apart_and_errors_pass_through() -> None:
    executor = AdaptiveExecutor(inline_limit_s=0.02)

    def failing() -> None:
        raise OSError(errno.EIO, "disk")

    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            await executor.run(failing, kind="fsync")
    assert executor.runs_inline("fsync")
    assert executor.average_s("other") is None


async def test_inline_work_still_lets_others_run() -> None:
    executor = AdaptiveExecutor(inline_limit_s=10)
    await executor.run(lambda: None, kind="x")
    with trio.testing.assert_checkpoints():
        await executor.run(lambda: None, kind="x")


async def test_inline_work_does_not_run_beside_a_thread_of_its_kind() -> None:
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    running = 0
    together = 0

    def work() -> None:
        nonlocal running, together
        running += 1
        together = max(together, running)
        time.sleep(0.001)
        running -= 1

    async with trio.open_nursery() as workers:
        for _ in range(20):
            workers.start_soon(lambda: executor.run(work, kind="x"))
    assert together == 1


async def test_cancelled_work_is_finished() -> None:
    executor = AdaptiveExecutor()
    finished: list[bool] = []

    def work() -> None:
        time.sleep(0.02)
        finished.append(True)

    with trio.move_on_after(0.001):
        await executor.run(work, kind="x")
    assert finished == [True]


async def test_listener_waits_out_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_a_listener_that_cannot_accept_goes_on_and_says_so(
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


async def test_client_checks_who_it_talks_to(
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


FLOOD = """
import re
from pathlib import Path
from remoting.edge import give_freed_memory_back

def resident_kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

if {bounded}:
    give_freed_memory_back()
# The first large block that is freed makes the library take later ones from its heap.
first = bytearray(b"x") * (8 << 20)
del first
before = resident_kib()
frames, small = [], []
for _ in range(20):
    frames.append(bytearray(b"x") * (1 << 20))
    small.append(b"x" * 50_000)
held = resident_kib() - before
frames.clear()
print(held, resident_kib() - before)
"""


def test_freed_large_blocks_go_back_to_the_machine() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("another C library than glibc")
    left = {}
    for bounded in (True, False):
        code = FLOOD.format(bounded=bounded)
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        held, left[bounded] = map(int, said.stdout.split())
        assert held > 18 * 1024
    assert left[True] < 3 * 1024
    assert left[False] > 10 * 1024, "else this test shows nothing"
