"""TCP of this machine, plain and with TLS."""

from __future__ import annotations

import errno
import math
import os
import socket
import ssl
import struct
import sys
from typing import Final

import trio
from typing_extensions import Buffer

from dledger.commitlog.errors import ConfigError
from dledger.remoting.addresses import join_address
from dledger.remoting.log import get_logger
from dledger.remoting.seams import Listener, ServerTls, Stream, TlsMode

LISTEN_BACKLOG: Final = 1024
"""Connections that the kernel holds between two accepts (RocketMQ's number)."""

UNACKNOWLEDGED_TIMEOUT_MS: Final = 10_000
"""What the other machine's kernel has not acknowledged for so long ends a connection."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""How long a TLS handshake may take: a peer that stops half-way must not keep a descriptor."""

FD_EXHAUSTED_PAUSE_S: Final = 0.1
"""When descriptors run out, accepting again at once would only spin."""

ACCEPT_LOGGED_EVERY_S: Final = 60.0
"""A listener that cannot accept writes a line this often."""

_LINGER = "hh" if sys.platform == "win32" else "ii"

RESET_AT_CLOSE: Final = struct.pack(_LINGER, 1, 0)
"""Accepted connections are reset when the process is killed: clients of RocketMQ wait out their
time at a connection that merely ends, up to 30 s for a held pull."""

ORDERLY_CLOSE: Final = struct.pack(_LINGER, 0, 0)

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
        errno.ENOTCONN,  # lost between accept and getpeername
        errno.EPERM,  # a firewall refused
        errno.EPROTO,
        errno.ETIMEDOUT,
    )
)

_log = get_logger(__name__)


class TcpNetwork:
    """TCP of this machine, TCP_NODELAY on."""

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> Listener:
        """Bind *host* (a name or an address; empty means all) and listen.

        Raises OSError: it cannot be bound; the text names host and port.
        """
        failed = f"cannot listen on {join_address(host, port)}"
        try:
            found = await trio.socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
            # Of a name that has addresses of both families, that of IPv4.
            family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await sock.bind(address)
                sock.listen(LISTEN_BACKLOG)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise OSError(error.errno, f"{failed}: {error.strerror or error}") from error
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"{failed}: {error}") from error
        return TcpListener(trio.SocketListener(sock), tls)

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> Stream:
        """Connect, TLS handshake included.

        Raises OSError: refused, unreachable or timed out; nothing was sent.
        """
        try:
            with trio.fail_after(timeout_s):
                tcp = await _wrapped(await _opened(host, port))
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
            raise TimeoutError(
                f"no connection to {join_address(host, port)} within {timeout_s} s"
            ) from error
        except trio.BrokenResourceError as error:
            raise ConnectionError(
                f"TLS handshake with {join_address(host, port)} failed: {error.__cause__ or error}"
            ) from error


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
                tcp.linger(RESET_AT_CLOSE)
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


class SocketStream:
    """A connected TCP socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = stream.socket
        self._stream = stream
        # The last receive took all there was: the next one waits before it tries.
        self._is_drained = False
        self._at_close = ORDERLY_CLOSE
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

    def send_some_nowait(self, data: Buffer) -> int:
        """Send the beginning of *data*; return how many bytes: 0 when the socket is full."""
        if sys.platform == "win32":  # sockets are no descriptors there: the waiting way sends
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        data: bytes | None = None
        if self._is_drained:
            data = await self._receive_next(max_bytes)
        if data is None:
            data = await self._stream.receive_some(max_bytes)
        self._is_drained = 0 < len(data) < max_bytes and sys.platform != "win32"
        return data

    async def _receive_next(self, max_bytes: int) -> bytes | None:
        """Wait for the next bytes and return them; None: there are none after all.

        trio's own way tries first, which costs a call and an error when there is nothing, and a
        turn of the event loop when there is something.
        """
        if self._socket.fileno() < 0:
            raise trio.ClosedResourceError("this socket was already closed")
        try:
            await trio.lowlevel.wait_readable(self._socket)
            return os.read(self._socket.fileno(), max_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            if self._socket.fileno() < 0:
                raise trio.ClosedResourceError("this socket was already closed") from None
            raise trio.BrokenResourceError(f"socket connection broken: {error}") from error

    async def aclose(self) -> None:
        """Close both directions at once, in order: what was sent still arrives."""
        self.linger_at_close()
        await self._stream.aclose()

    def reset_at_close(self) -> None:
        """Have the other end see a reset when this one is closed."""
        self._at_close = RESET_AT_CLOSE

    def linger_at_close(self) -> None:
        """Set how the connection ends; to be called right before it is closed."""
        self.linger(self._at_close)

    def linger(self, option: bytes) -> None:
        """Set what the kernel does when the socket is closed, by the process or by its death."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)

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
        self.reset_at_close = tcp.reset_at_close
        self._tcp = tcp
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
        self._tcp.linger_at_close()
        await trio.aclose_forcefully(self._stream)


class _ServerStream:
    """An accepted connection that finds out by itself, on first use, whether it is TLS."""

    def __init__(self, tcp: SocketStream, tls: ServerTls) -> None:
        self.peer_address = tcp.peer_address
        self.local_address = tcp.local_address
        self.reset_at_close = tcp.reset_at_close
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

    def send_some_nowait(self, data: Buffer) -> int:
        """Send the beginning of *data*; 0 also with TLS, and before it is known whether it is."""
        inner = self._inner
        return inner.send_some_nowait(data) if isinstance(inner, SocketStream) else 0

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


async def _opened(host: str, port: int) -> trio.SocketStream:
    """Connect; an error has the reason of the first attempt, for people."""
    try:
        return await trio.open_tcp_stream(host, port)
    except OSError as error:
        several = error.__cause__
        first = several.exceptions[0] if isinstance(several, BaseExceptionGroup) else error
        number = getattr(first, "errno", None)
        if number is None or isinstance(first, socket.gaierror):
            raise
        raise OSError(number, os.strerror(number)) from error


async def _wrapped(stream: trio.SocketStream) -> SocketStream:
    try:
        return SocketStream(stream)
    except OSError:  # the peer closed already and has no address any more
        await stream.aclose()
        raise


def _address(raw: object) -> tuple[str, int]:
    if isinstance(raw, tuple) and len(raw) >= 2:
        return str(raw[0]), int(raw[1])
    return str(raw), 0


def server_tls(
    mode: TlsMode, *, cert_file: str | None, key_file: str | None, client_ca_file: str | None = None
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
        load_certificate(context, cert_file, key_file)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {cert_file}, {key_file}: {error}") from error
    return ServerTls(mode, context)


def client_tls(
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    verify: bool = True,
) -> ssl.SSLContext:
    """Return a client's TLS settings from files named in the configuration.

    Args:
        ca_file: Authorities that sign servers; None means the authorities of this machine.
        verify: False accepts any certificate, as RocketMQ's test mode does.
    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            load_certificate(context, cert_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {ca_file}, {cert_file}: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    """Let *context* show a certificate. Blocking.

    Raises OSError: a file cannot be read, or the two do not belong together.
    """
    context.load_cert_chain(cert_file, key_file, _no_password)


def _no_password() -> str:
    """Stand in for the prompt that would stop a daemon: an encrypted key cannot be read."""
    return ""
