"""The gRPC server: calls come in by asyncio and are carried into trio.

gRPC's own server is asyncio's; the SDK is a guest of its loop (`dledger.aio`). So a call changes
the event loop once on its way in and once on its way out, and its cancellation cancels what runs
for it.

gRPC keeps an answer until its client reads it: a call that comes while too much is held
(`HeldBytes`) is refused before anything is asked of brokers. It also keeps a request until all of
it is there, as soon as the program reads: so a request is read when its host has its turn, and what
clients send before that is bounded by the windows of HTTP/2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2

from dledger.aio.guest import Guest, Held
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError
from dledger.commitlog.errors import ConfigError, MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.access import host_of
from dledger.proxy.caller import REQUEST_MESSAGE_BYTES_MAX, Caller, HeldBytes
from dledger.proxy.messages import MAX_MESSAGE_BYTES, full_name
from dledger.proxy.metrics import CallMetrics, OpenCall, ProxyMetrics, served_page
from dledger.proxy.open_receives import Received
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError, status_of
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.addresses import join_address
from dledger.remoting.log import get_logger
from dledger.remoting.tcp import TcpNetwork

UNREAD_BYTES_MAX: Final = 256 << 20
"""Of answers and commands that wait, for all clients of a proxy, as much as a broker keeps for its
connections. Receives that are under way when it is reached come on top, until there is twice as
much."""

REQUEST_BYTES_MAX: Final = 40 << 20
"""Of requests that are read or under way, and once more of receives that wait. What is read counts
as the largest request until it is there: a host reads two at a time, and its others wait."""


SERVICE: Final = "apache.rocketmq.v2.MessagingService"

READ_S: Final = 20.0
"""For how long a call may wait for its turn and its request; then it ends as RESOURCE_EXHAUSTED,
and nothing was done for it."""

CONNECTIONS_MAX: Final = 4_096
"""Connections of clients, each with about 60 KiB; one more is closed at once."""

STREAMS_MAX: Final = 4_096
"""Calls of one connection at a time; a client lets others wait."""

LOOKAHEAD_BYTES: Final = 16 << 10
"""Of one call, what a client may send before the program reads it."""

READ_BYTES: Final = 256 << 10
"""Of one connection at a time."""

MAX_CALLS: Final = 20_000
"""Calls open at a time, streams and waiting receives included; one more is refused by gRPC as
RESOURCE_EXHAUSTED, and nothing was sent for it."""

COMMANDS_MAX: Final = 1_024
"""Commands that wait for one client's stream; one more is dropped. Brokers ask again."""

COMMANDS_BYTES_MAX: Final = MAX_MESSAGE_BYTES
"""Of them together; what would be more is dropped, too."""

RECEIVE_BYTES_MIN: Final = 2 << 10
"""What a receive counts for at least: its task waits for brokers when its client has ended it, and
`MAX_CALLS` bounds none that was ended. As many as that fit for one host."""

TOO_MUCH_WAITS: Final = "too many bytes wait for clients that read nothing"

TOO_MUCH_IS_ASKED: Final = "too many bytes of requests are under way; nothing was done for this one"

GRACE_S: Final = 5.0
"""How long calls may go on when the proxy stops; clients go to another one meanwhile."""

KEEPALIVE_MS: Final = 20_000
"""After so long without a word of a client its connection is tried: without that the streams of a
host that lost power, or its network, stay open for two hours."""

KEEPALIVE_ANSWER_MS: Final = 10_000
"""Then a connection without an answer ends."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", REQUEST_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # It would make windows larger that nothing is read from.
    ("grpc.http2.bdp_probe", 0),
    # What one connection is read into at once; it has 4 MiB otherwise.
    ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Calls that came at once and are not begun yet: of more than 1,000 gRPC would drop some, and
    # their clients would not know that nothing was done.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
)

METHODS: Final = pb.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name

Handle = Callable[[Any, Any], Awaitable[Any]]
"""Takes a request, or an iterator that is not used, and the call."""

_log = get_logger(__name__)


class _Handlers:
    """The calls of the service as gRPC takes them."""

    def __init__(self, service: MessagingService, guest: Guest, calls: CallMetrics) -> None:
        self._service = service
        self._guest = guest
        self._calls = calls
        self._unread = HeldBytes(UNREAD_BYTES_MAX)
        self._requests = HeldBytes(REQUEST_BYTES_MAX)
        self._receives = HeldBytes(REQUEST_BYTES_MAX)

    def handle(self, name: str) -> Handle:
        """Return what answers a call of the interface file whose request was read."""
        streams: dict[str, Handle] = {
            "ReceiveMessage": self._receive,
            "PullMessage": self._pull,
            "Telemetry": self._telemetry,
        }
        return streams.get(name) or self._unary(name, GetMessageClass(METHODS[name].output_type))

    def table(self) -> dict[str, Any]:
        """Return a handler for each call of the interface file."""
        found: dict[str, Any] = {}
        for method in METHODS.values():
            answer, handle = GetMessageClass(method.output_type), self.handle(method.name)
            # To a client a call with one request is the same, whether the program reads it or not.
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.server_streaming
                else grpc.stream_unary_rpc_method_handler
            )
            found[method.name] = make(
                handle if method.client_streaming else self._with_request(handle),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=answer.SerializeToString,
            )
        return found

    def checks(self, servicer: health.aio.HealthServicer) -> dict[str, Any]:
        """Return handlers for gRPC's checks of health; they are read as all requests."""
        made = {
            "Check": grpc.stream_unary_rpc_method_handler,
            "Watch": grpc.stream_stream_rpc_method_handler,
        }
        return {
            name: make(
                self._with_request(getattr(servicer, name)),
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            )
            for name, make in made.items()
        }

    @asynccontextmanager
    async def _read(self, context: Any, *, is_held: bool) -> AsyncIterator[Any]:
        """Give the request of a call when its host has its turn; the call ends where none comes.

        With *is_held* it counts while the block runs.
        """
        turn = self._requests.turn(host_of(context.peer()))
        limit = asyncio.timeout(READ_S)
        try:
            async with limit, turn as hold:
                request = await context.read()
                limit.reschedule(None)
                if request is grpc.aio.EOF:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
                hold(request.ByteSize() if is_held else 0)
                yield request
        except TimeoutError:
            if not limit.expired():
                raise
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MUCH_IS_ASKED)

    def _with_request(self, handle: Handle) -> Handle:
        async def read(_requests: Any, context: Any) -> Any:
            # A receive waits for messages long after it was read: what it holds counts elsewhere.
            async with self._read(context, is_held=handle != self._receive) as request:
                return await handle(request, context)

        return read

    def _unary(self, name: str, answer: Any) -> Handle:
        call = self._service.calls[name]

        async def handle(request: Any, context: Any) -> Any:
            caller = caller_of(context)
            with self._calls.counted(name) as counted:
                try:
                    self._service.admit(name, request, caller)
                    carried = self._guest.carry(self._service.in_time, call, request, caller)
                    answered = await carried
                except Exception as error:  # noqa: BLE001  # each has a code
                    answered = answer(status=_status(name, error))
                counted.answered(answered)
            return answered

        return handle

    def _hold(self, request: Any, caller: Caller, held: HeldBytes) -> Callable[[], None]:
        """Count a request until what is returned is called.

        Raises RefusedError: too much is held for its host, or for all.
        """
        least_bytes = RECEIVE_BYTES_MIN if held is self._receives else 0
        host, size_bytes = host_of(caller.peer), max(least_bytes, request.ByteSize())
        if held.is_full(host):
            raise RefusedError(pb.TOO_MANY_REQUESTS, TOO_MUCH_IS_ASKED)
        held.count(host, size_bytes)
        return partial(held.count, host, -size_bytes)

    async def _receive(self, request: pb.ReceiveMessageRequest, context: Any) -> None:
        with self._calls.counted("ReceiveMessage") as counted:
            await self._received(request, context, counted)

    async def _received(
        self, request: pb.ReceiveMessageRequest, context: Any, counted: OpenCall
    ) -> None:
        caller = caller_of(context)
        host = host_of(caller.peer)
        received = Received(full_name(request.group))
        is_written = False
        size_bytes = 0
        try:
            try:
                self._service.admit("ReceiveMessage", request, caller)
                if self._unread.is_full(host):
                    raise RefusedError(pb.TOO_MANY_REQUESTS, TOO_MUCH_WAITS)
                receive = self._service.receive_message
                received.release = self._hold(request, caller, self._receives)
                await self._guest.carry(receive, request, caller, received)
                found_bytes = sum(answer.ByteSize() for answer in received.answers)
                if not self._unread.fits(found_bytes):
                    raise RefusedError(pb.TOO_MANY_REQUESTS, TOO_MUCH_WAITS)
            except Exception as error:  # noqa: BLE001  # each has a code
                refusal = pb.ReceiveMessageResponse(status=_status("ReceiveMessage", error))
                await context.write(refusal)
                counted.answered(refusal)
                return
            size_bytes = found_bytes
            self._unread.count(host, size_bytes)
            for answer in received.answers:
                if context.done():
                    return
                received.seen += answer.HasField("message")
                await context.write(answer)
            is_written = True
            counted.answered(*received.answers)
        finally:
            self._unread.count(host, -size_bytes)
            # Clients drop what they have of a call that did not end well. Until brokers have
            # answered, its request is held.
            if is_written:
                received.release()
            else:
                with suppress(ClientClosedError):
                    self._guest.start(self._service.abandon, received)

    async def _pull(self, request: pb.PullMessageRequest, context: Any) -> None:
        caller = caller_of(context)
        host = host_of(caller.peer)
        with self._calls.counted("PullMessage") as counted:
            try:
                self._service.admit("PullMessage", request, caller)
                if self._unread.is_full(host):
                    raise RefusedError(pb.TOO_MANY_REQUESTS, TOO_MUCH_WAITS)
                pull = self._service.pull_message
                answers = await self._guest.carry(self._service.in_time, pull, request, caller)
                size_bytes = sum(answer.ByteSize() for answer in answers)
                if not self._unread.fits(size_bytes):
                    raise RefusedError(pb.TOO_MANY_REQUESTS, TOO_MUCH_WAITS)
            except Exception as error:  # noqa: BLE001  # each has a code
                answers = [pb.PullMessageResponse(status=_status("PullMessage", error))]
                size_bytes = 0
            self._unread.count(host, size_bytes)
            try:
                for answer in answers:
                    await context.write(answer)
            finally:
                self._unread.count(host, -size_bytes)
            counted.answered(*answers)

    async def _telemetry(self, _requests: Any, context: Any) -> None:
        caller = caller_of(context)
        waiting = _Commands(caller, self._unread)

        try:
            self._service.admit("Telemetry", pb.TelemetryCommand(), caller)
        except MQError as error:
            await context.write(pb.TelemetryCommand(status=status_of(error)))
            return
        stream = self._service.open_stream(caller, waiting.push)
        if stream is None:
            status = pb.Status(code=pb.CLIENT_ID_REQUIRED, message="the stream names no client")
            if caller.client_id:
                status = pb.Status(code=pb.TOO_MANY_REQUESTS, message="too many clients are here")
            await context.write(pb.TelemetryCommand(status=status))
            return
        writing = asyncio.create_task(waiting.keep_writing(context))
        try:
            async with self._read(context, is_held=False) as command:
                pass  # a stream begins with its settings
            while command is not grpc.aio.EOF:
                try:
                    release = self._hold(command, caller, self._requests)
                    try:
                        answer = await self._guest.carry(self._service.telemetry, command, caller)
                    finally:
                        release()
                except RefusedError as error:
                    answer = pb.TelemetryCommand(status=status_of(error))
                if answer is not None:
                    waiting.push(answer)
                command = await context.read()
        finally:
            writing.cancel()
            waiting.close()
            self._service.close_stream(caller, stream)


class _Commands:
    """Commands that wait for one stream, in their order."""

    def __init__(self, caller: Caller, unread: HeldBytes) -> None:
        self._caller = caller
        self._host = host_of(caller.peer)
        self._unread = unread
        self._waiting: asyncio.Queue[tuple[pb.TelemetryCommand, int]] = asyncio.Queue(COMMANDS_MAX)
        self._bytes = 0
        self._is_closed = self._is_dropping = False

    def push(self, command: pb.TelemetryCommand) -> None:
        """Let a command wait; it is dropped when its client leaves too much unread."""
        if self._is_closed:
            return
        size_bytes = command.ByteSize()
        is_full = self._waiting.full() or self._unread.is_full(self._host)
        if is_full or self._bytes + size_bytes > COMMANDS_BYTES_MAX:
            if not self._is_dropping:
                # Once until the client reads again: it can send as fast as lines are logged.
                _log.warning(
                    "command_dropped",
                    client_id=self._caller.client_id,
                    waiting=self._waiting.qsize(),
                    waiting_bytes=self._bytes,
                )
            self._is_dropping = True
            return
        self._count(size_bytes)
        self._waiting.put_nowait((command, size_bytes))

    async def keep_writing(self, context: Any) -> None:
        """Write what waits, until cancelled."""
        while True:
            command, size_bytes = await self._waiting.get()
            await context.write(command)
            self._is_dropping = False
            self._count(-size_bytes)

    def close(self) -> None:
        """Forget what waits, and take no more."""
        self._is_closed = True
        self._count(-self._bytes)

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._unread.count(self._host, size_bytes)


def _status(name: str, error: Exception) -> pb.Status:
    """Return the status for what ended a call; what no code is meant for is logged.

    The frames that the error came through are let go: they hold the request, and are held in
    circles by errors beneath it, which would stay until a collection.
    """
    if isinstance(error, MQError):
        cause: BaseException | None = error
        while cause is not None:
            cause = cause.with_traceback(None).__context__
        return status_of(error)
    _log.error("call_failed", call=name, error=repr(error), exc_info=error)
    return pb.Status(code=pb.INTERNAL_ERROR, message=f"{name} failed: {type(error).__name__}")


def caller_of(context: Any) -> Caller:
    """Return the client that makes a call."""
    metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    return Caller.of(metadata, context.peer(), context.time_remaining())


@asynccontextmanager
async def serving(
    instance: ClientInstance,
    listen: tuple[str, int],
    *,
    advertised: tuple[str, int] | None = None,
    tls: grpc.ServerCredentials | None = None,
    accounts: AccountStore | None = None,
    page_at: tuple[str, int] | None = None,
) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port.

    At the end calls may go on for `GRACE_S`.

    Args:
        instance: Of the SDK; not open, and used by nothing else.
        listen: Address to bind; port 0 takes a free one.
        advertised: Where clients reach this proxy, if not at *listen*.
        page_at: Where the page for Prometheus is served; None: nowhere.
    Raises:
        ConfigError: The address cannot be bound.
    """
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    host, port = listen
    address = join_address(host, port)
    try:
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls)
        )
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    guest = await Guest.enter()
    try:
        service = MessagingService(instance, advertised or (host, bound), accounts)
        held = Held(guest, service.open())
        await held.open()
        try:
            calls = CallMetrics(service.clock)
            handlers = _Handlers(service, guest, calls)
            server.add_registered_method_handlers(SERVICE, handlers.table())
            checks = health.aio.HealthServicer()
            server.add_registered_method_handlers(health.SERVICE_NAME, handlers.checks(checks))
            await server.start()
            for name in ("", SERVICE):
                await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
            metrics = ProxyMetrics(service, calls, join_address(host, bound))
            page = None
            if page_at is not None:
                page = Held(guest, served_page(metrics, TcpNetwork(), page_at))
                await page.open()
            try:
                yield bound
            finally:
                metrics.is_stopping = True
                try:
                    await checks.enter_graceful_shutdown()
                    await server.stop(GRACE_S)
                finally:
                    if page is not None:
                        await page.close()
        finally:
            await held.close()
    finally:
        await guest.leave()
