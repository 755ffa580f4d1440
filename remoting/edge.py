"""The real world behind the seams: clock, randomness, TCP, worker threads, TLS files, memory.

The only module of this package that may touch time, randomness, sockets and threads.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio
from typing_extensions import Buffer

from commitlog.errors import ConfigError
from remoting.log import get_logger
from remoting.seams import Listener, ServerTls, Stream, TlsMode

T = TypeVar("T")

# Connections the kernel holds for us between two accepts (RocketMQ's number).
LISTEN_BACKLOG: Final = 1024
# What was sent and not acknowledged by the other machine's kernel for so long ends a connection.
UNACKNOWLEDGED_TIMEOUT_MS: Final = 10_000
# How long a TLS handshake may take: a peer that stops half-way must not keep a descriptor.
HANDSHAKE_TIMEOUT_S: Final = 10.0
# When descriptors run out, accepting again at once would only spin.
FD_EXHAUSTED_PAUSE_S: Final = 0.1
# While a listener cannot accept it says so this often.
ACCEPT_LOGGED_EVERY_S: Final = 60.0
# Python's own 5 ms would be most of a flush's latency.
SWITCH_INTERVAL_S: Final = 0.0005
# Work cheaper than this runs on the event loop: a thread hand-over costs about 0.1 ms and twice
# the wake-ups.
INLINE_LIMIT_S: Final = 0.001
# Weight of the newest duration in the moving average: a slow disk is noticed after a few runs,
# one hiccup is not a trend.
DURATION_WEIGHT: Final = 0.2
# Work that looks slower than this in a thread is never tried inline: a trial stops everything else.
TRIAL_LIMIT_S: Final = 0.02
# So that trials of work that stays slow cost the event loop about 3 % of its flushes.
STALL_S = 0.02
"""Inline work that takes longer has held up everything else: a file system that is busy with other
files makes a flush of this one wait."""

RUNS_AFTER_STALL = 500
"""Runs in a thread after such a one: at a thousand flushes a second half a second, at ten a
minute."""

RUNS_BETWEEN_TRIALS: Final = 32
# One thread per kind: what one kind does (flushing one disk) gains nothing from two at a time.
THREADS_PER_KIND: Final = 1

LARGE_BLOCK_BYTES: Final = 128 * 1024
"""glibc's own bound before it begins to move it: blocks from here on are mappings of their own."""

# <malloc.h>
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

CGROUPS: Final = "/sys/fs/cgroup"
OWN_CGROUPS: Final = "/proc/self/cgroup"

_TLS_FIRST_BYTE: Final = 0x16
# What accept(2) reports of the connection it was about to return, not of the listener.
_GONE_ERRORS: Final = frozenset(
    (
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,  # gone between accept and getpeername
        errno.EPERM,  # a firewall said no
        errno.EPROTO,
        errno.ETIMEDOUT,
    )
)

_log = get_logger(__name__)


def memory_bytes(cgroups: str = CGROUPS, own: str = OWN_CGROUPS) -> int:
    """Return how much memory this process may use: the machine's, or less in a container.

    Args:
        cgroups: Where the kernel shows control groups.
        own: The file that names the groups of this process.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(cgroups, own)])


def _cgroup_limits(cgroups: str, own: str) -> list[int]:
    """Return the limits of the groups that this process is in, of both versions of the interface.

    Inside a container its own group is often shown as the root, so that is looked at as well.
    """
    files = [f"{cgroups}/memory.max", f"{cgroups}/memory/memory.limit_in_bytes"]
    for line in _text_of(own).splitlines():
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0":
            while path.strip("/"):
                files.append(f"{cgroups}{path}/memory.max")
                path = path.rpartition("/")[0]
        elif "memory" in kinds.split(","):
            files.append(f"{cgroups}/memory{path}/memory.limit_in_bytes")
    texts = (_text_of(file).strip() for file in files)
    return [int(text) for text in texts if text.isdecimal()]  # "max": none


def _text_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def give_freed_memory_back() -> None:
    """Have the C library return each freed block of 128 KiB or more to the machine, at once.

    glibc raises that bound by itself up to 32 MiB: what one flood of large frames took stays with
    the process, in pieces that the next one does not fit into. With the bound fixed a large block
    costs its page faults each time, so this is for daemons that seldom have one. Elsewhere than
    with glibc nothing happens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        set_option(option, LARGE_BLOCK_BYTES)


def local_offset_ms(wall_ms: int) -> int:
    """Return the milliseconds that this machine's local time (``TZ``) is ahead of UTC then."""
    return time.localtime(wall_ms / 1000).tm_gmtoff * 1000


class TrioClock:
    """The machine's clock; durations on trio's clock, so that tests may replace that alone."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        return trio.current_time()

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch; may jump."""
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Sleep for *seconds*."""
        await trio.sleep(seconds)

    def time_out(self, seconds: float) -> trio.CancelScope:
        """Cancel the block after *seconds*."""
        return trio.move_on_after(seconds)


class SystemRng:
    """Randomness that nobody can predict at start: a generator seeded by the operating system.

    Timers draw from it all the time, so a system call per number would be a waste.
    """

    def __init__(self) -> None:
        self._random = random.Random(random.SystemRandom().randbytes(32))

    def random(self) -> float:
        """Return a float in [0, 1)."""
        return self._random.random()

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""
        return self._random.randrange(stop)

    def randbytes(self, n: int, /) -> bytes:
        """Return *n* random bytes."""
        return self._random.randbytes(n)


class SocketStream:
    """A connected TCP socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = stream.socket
        self._stream = stream
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Else a cut that drops packets is noticed, and left, only after minutes of back-off.
            stream.socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_TIMEOUT_MS
            )
        self.peer_address = _address(stream.socket.getpeername())
        self.local_address = _address(stream.socket.getsockname())

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        await self._stream.send_all(memoryview(data))

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close both directions at once."""
        await self._stream.aclose()

    async def first_byte(self) -> int:
        """Return the first byte to be received, which stays to be received; -1 at the end."""
        try:
            first = await self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error
        return first[0] if first else -1

    @property
    def plain(self) -> trio.SocketStream:
        """The trio stream below, for a TLS layer to be put on."""
        return self._stream


class TlsStream:
    """TLS over a TCP socket."""

    def __init__(
        self, tcp: SocketStream, context: ssl.SSLContext, *, server_hostname: str | None
    ) -> None:
        self.peer_address = tcp.peer_address
        self.local_address = tcp.local_address
        self._stream: trio.SSLStream[trio.SocketStream] = trio.SSLStream(
            tcp.plain,
            context,
            server_hostname=server_hostname,
            server_side=server_hostname is None,
            https_compatible=True,
        )
        # send_all and receive_some both run the handshake; one that fails leaves the stream broken.

    async def handshake(self) -> None:
        """Agree on keys; raises trio.BrokenResourceError when the peer does not speak TLS."""
        await self._stream.do_handshake()

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        await self._stream.send_all(memoryview(data))

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close both directions at once."""
        # No closing handshake: the frames say where messages end, and a dead peer must not hold us.
        await trio.aclose_forcefully(self._stream)


class _ServerStream:
    """An accepted connection that finds out by itself, on first use, whether it is TLS."""

    def __init__(self, tcp: SocketStream, tls: ServerTls) -> None:
        self.peer_address = tcp.peer_address
        self.local_address = tcp.local_address
        self._tcp = tcp
        self._tls = tls
        self._inner: SocketStream | TlsStream | None = None
        self._opening = trio.Lock()

    async def _open(self) -> SocketStream | TlsStream:
        async with self._opening:
            if self._inner is None:
                self._inner = await self._negotiate()
            return self._inner

    async def _negotiate(self) -> SocketStream | TlsStream:
        context = self._tls.context
        if self._tls.mode == "permissive":
            first = await self._tcp.first_byte()
            if first != _TLS_FIRST_BYTE or context is None:
                return self._tcp
        if context is None:
            raise trio.BrokenResourceError("TLS is enforced and no certificate is loaded")
        stream = TlsStream(self._tcp, context, server_hostname=None)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                await stream.handshake()
        except trio.TooSlowError as error:
            raise trio.BrokenResourceError("no TLS handshake in time") from error
        return stream

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        inner = self._inner
        if inner is None:
            inner = await self._open()
        await inner.send_all(data)

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        inner = self._inner
        if inner is None:
            inner = await self._open()
        return await inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close both directions at once."""
        inner = self._inner
        await (self._tcp if inner is None else inner).aclose()


class TcpListener:
    """A bound TCP server socket."""

    def __init__(self, listener: trio.SocketListener, tls: ServerTls | None) -> None:
        self._listener = listener
        self._tls = tls if tls is not None and tls.mode != "disabled" else None
        self.address = _address(listener.socket.getsockname())
        self._failures = 0
        self._next_line_s = -math.inf

    async def accept(self) -> Stream:
        """Return the next connection.

        Waits while the process is out of descriptors, and tries again after any other error: what
        one connection or a short lack of something does must not end the daemon.
        """
        while True:
            try:
                tcp = await _wrapped(await self._listener.accept())
            except OSError as error:
                if error.errno not in _GONE_ERRORS:
                    self._note_failure(error)
                    await trio.sleep(FD_EXHAUSTED_PAUSE_S)
                continue
            return tcp if self._tls is None else _ServerStream(tcp, self._tls)

    def _note_failure(self, error: OSError) -> None:
        """Log that nothing can be accepted, once and then a line a minute."""
        self._failures += 1
        now_s = trio.current_time()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + ACCEPT_LOGGED_EVERY_S
            _log.warning(
                "accept_waits",
                address=self.address,
                error=str(error),
                times=self._failures,
                pause_s=FD_EXHAUSTED_PAUSE_S,
            )
            self._failures = 0

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()


class TcpNetwork:
    """TCP of this machine, TCP_NODELAY on."""

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> Listener:
        """Bind *host* (a name or an address; empty means all) and listen.

        Raises:
            OSError: It cannot be bound; the text names host and port.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = await trio.socket.getaddrinfo(
            host or "0.0.0.0",
            port,
            family,
            socket.SOCK_STREAM,
        )
        sock = trio.socket.socket(found[0][0], socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await sock.bind(found[0][4])
            sock.listen(LISTEN_BACKLOG)
        except OSError as error:
            sock.close()
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise OSError(error.errno, reason) from error
        except BaseException:
            sock.close()
            raise
        return TcpListener(trio.SocketListener(sock), tls)

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> Stream:
        """Connect, TLS handshake included.

        Raises:
            OSError: Refused, unreachable or timed out; nothing was sent.
        """
        try:
            with trio.fail_after(timeout_s):
                tcp = await _wrapped(await trio.open_tcp_stream(host, port))
                if tls is None:
                    return tcp
                stream = TlsStream(tcp, tls, server_hostname=host)
                try:
                    await stream.handshake()
                except BaseException:
                    await trio.aclose_forcefully(tcp.plain)
                    raise
                return stream
        except trio.TooSlowError as error:
            raise TimeoutError(f"no connection to {host}:{port} within {timeout_s} s") from error
        except trio.BrokenResourceError as error:
            raise ConnectionError(
                f"TLS handshake with {host}:{port} failed: {error.__cause__ or error}"
            ) from error


@dataclass(slots=True)
class _Measured:
    """What is known about one kind of work."""

    limiter: trio.CapacityLimiter
    # Moving averages; None before the first run of that way.
    inline_s: float | None = None
    threaded_s: float | None = None
    runs_since_inline: int = 0
    # Runs that go to a thread whatever they take.
    runs_in_threads: int = 0

    def note_inline(self, took_s: float, inline_limit_s: float) -> None:
        self.runs_since_inline = 0
        if took_s > STALL_S:
            self.runs_in_threads = RUNS_AFTER_STALL
        tried = self.inline_s is None or self.inline_s >= inline_limit_s
        self.inline_s = took_s if tried else _moved(self.inline_s, took_s)

    def note_threaded(self, took_s: float, inline_limit_s: float) -> None:
        self.runs_since_inline += 1
        self.runs_in_threads = max(self.runs_in_threads - 1, 0)
        self.threaded_s = _moved(self.threaded_s, took_s)
        if took_s < inline_limit_s:  # waiting for the interpreter included: it is cheap for sure
            self.inline_s = took_s


def _moved(average_s: float | None, took_s: float) -> float:
    return took_s if average_s is None else average_s + DURATION_WEIGHT * (took_s - average_s)


class AdaptiveExecutor:
    """Runs blocking work inline while it is cheap and in a worker thread once it is not.

    A flush that takes 0.1 ms is cheaper inline than through a thread; one that takes 5 ms would
    stop every other connection. The decision is made per kind from a moving average of measured
    durations. In a thread a duration contains the wait for the interpreter, which under load is
    much longer than the work: so from time to time work that does not look very slow is tried
    inline, and a disk that has become fast is noticed. The first run of a kind goes to a thread:
    nothing is known yet. After one that has held up the loop the next ones do, too, and so does
    all work while other work is in a thread: a flush waits for the disk that a checkpoint uses.
    """

    def __init__(self, *, inline_limit_s: float = INLINE_LIMIT_S) -> None:
        self._inline_limit_s = inline_limit_s
        self._kinds: dict[str, _Measured] = {}
        self._in_threads = 0
        # A worker that has finished waits this long for the interpreter while the loop is busy.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def average_s(self, kind: str) -> float | None:
        """Return the moving average of *kind* in seconds; None before its first run."""
        measured = self._kinds.get(kind)
        if measured is None:
            return None
        return measured.threaded_s if measured.inline_s is None else measured.inline_s

    def runs_inline(self, kind: str) -> bool:
        """Tell where the next work of *kind* would run."""
        measured = self._kinds.get(kind)
        if measured is None or measured.threaded_s is None or self._in_threads:
            # Inline work must not overtake, nor run beside, work of its kind that is in a thread;
            # and beside other work it may wait for the disk.
            return False
        if measured.runs_in_threads:
            return False
        if measured.inline_s is not None and measured.inline_s < self._inline_limit_s:
            return True
        return measured.threaded_s < TRIAL_LIMIT_S and (
            measured.inline_s is None or measured.runs_since_inline >= RUNS_BETWEEN_TRIALS
        )

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now and measure it."""
        measured = self._known(kind)
        started = time.perf_counter()
        try:
            return work()
        finally:
            measured.note_inline(time.perf_counter() - started, self._inline_limit_s)

    def _known(self, kind: str) -> _Measured:
        measured = self._kinds.get(kind)
        if measured is None:
            measured = self._kinds[kind] = _Measured(trio.CapacityLimiter(THREADS_PER_KIND))
        return measured

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* to its end and return its result; errors pass through."""
        known = self._known(kind)
        if self.runs_inline(kind):
            await trio.lowlevel.checkpoint()
            if not self._in_threads:
                return self.run_inline(work, kind=kind)

        def timed() -> T:
            started = time.perf_counter()
            try:
                return work()
            finally:
                known.note_threaded(time.perf_counter() - started, self._inline_limit_s)

        self._in_threads += 1
        try:
            return await trio.to_thread.run_sync(timed, limiter=known.limiter)
        finally:
            self._in_threads -= 1


class ThreadExecutor:
    """Runs blocking work in worker threads, always: for work that belongs to somebody else.

    One thread per kind, as in `AdaptiveExecutor`; nothing is measured, and nothing of somebody
    else's runs on the event loop.
    """

    def __init__(self) -> None:
        self._limiters: dict[str, trio.CapacityLimiter] = {}

    def runs_inline(self, kind: str) -> bool:
        """Tell that it never does."""
        return False

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now, because the caller says so."""
        return work()

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* to its end in a thread and return its result; errors pass through."""
        limiter = self._limiters.get(kind)
        if limiter is None:
            limiter = self._limiters[kind] = trio.CapacityLimiter(THREADS_PER_KIND)
        return await trio.to_thread.run_sync(work, limiter=limiter)


def server_tls(
    mode: TlsMode,
    *,
    cert_file: str | None,
    key_file: str | None,
    client_ca_file: str | None = None,
) -> ServerTls:
    """Return the listener's TLS settings from files named in the configuration.

    Args:
        client_ca_file: When given, clients that speak TLS must show a certificate it signed.
    Raises:
        ConfigError: A file is missing or not what it should be, or `enforcing` has no certificate.
    """
    if mode == "disabled":
        return ServerTls("disabled")
    if cert_file is None:
        if mode == "enforcing":
            raise ConfigError("tls mode is enforcing but no certificate file is configured")
        return ServerTls("permissive")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file, _no_password)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {cert_file}, {key_file}: {error}") from error
    return ServerTls(mode, context)


def _no_password() -> str:
    """Stand in for the prompt that would stop a daemon: an encrypted key cannot be read."""
    return ""


def client_tls(
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    verify: bool = True,
) -> ssl.SSLContext:
    """Return a client's TLS settings from files named in the configuration.

    Args:
        ca_file: Who signs servers; None means the authorities of this machine.
        verify: False accepts any certificate, as RocketMQ's test mode does.
    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file, _no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {ca_file}, {cert_file}: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def _wrapped(stream: trio.SocketStream) -> SocketStream:
    try:
        return SocketStream(stream)
    except OSError:  # the peer is gone already and has no address any more
        await stream.aclose()
        raise


def _address(raw: object) -> tuple[str, int]:
    if isinstance(raw, tuple) and len(raw) >= 2:
        return str(raw[0]), int(raw[1])
    return str(raw), 0
