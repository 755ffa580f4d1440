"""The edge of quotas: before the handler of each request that a client makes with messages.

Sends are appended at once and answered late; requests for messages wait before they are handled.
Both only up to a bound, then they are refused; `dledger.services.quota_buckets` decides that. A
connection more than a quota allows is closed at its first request that counts.

Where there is no quota a request costs one look at the table of quotas.

Spec: docs/operate/quotas.md.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from typing_extensions import Buffer

from dledger.broker_errors import QuotaExceededError
from dledger.commitlog.message_batch import MIN_ITEM_BYTES
from dledger.commitlog.record import MIN_RECORD_BYTES
from dledger.group_api import BrokerGroup
from dledger.remoting.access.gate import admit_as, admitted_account, limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.processor import Answered, Handled
from dledger.remoting.processor_table import Handler
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.seams import Clock
from dledger.services.quota_buckets import Cost, QuotaBuckets, Verdict
from dledger.state.quotas import ACCOUNT, CLIENT, QuotaConfig, quota_key

CONNECT_AGAIN_MS: Final = 1_000
"""A client whose connection was closed is asked to wait so long before it opens another one."""

_CLIENT_ID: Final = "client id"
"""Attribute of a connection: the id that its client announced."""

_COUNTED: Final = "counted by quota"
"""Attribute of a connection: the key it is counted under."""

# ------------------------------------------------------------------------------- what counts how


CostOf: TypeAlias = Callable[[RemotingCommand], Cost]


class Meter(NamedTuple):
    """How a request counts. Neither of these: it shows only that a connection is in use.

    Attributes:
        sends: Returns what it sends.
        receives: Its answer has messages.
    """

    sends: CostOf | None = None
    receives: bool = False


def sent_messages(command: RemotingCommand) -> Cost:
    """Return the cost of a send in one of RocketMQ's encodings; a reply is one message. Pure."""
    view = memoryview(command.body)
    is_batch = command.code == RequestCode.SEND_BATCH_MESSAGE
    is_batch = is_batch or str(command.ext.get("m", command.ext.get("batch"))).lower() == "true"
    return Cost(_items(view, MIN_ITEM_BYTES) if is_batch else 1, view.nbytes)


def sent_records(command: RemotingCommand) -> Cost:
    """Return the cost of a send in record layout. Pure.

    What its runs claim is not checked yet: no more messages count than its bytes can hold.
    """
    size = memoryview(command.body).nbytes
    runs = command.ext.get("runs")
    counts = [
        run[2]
        for run in (runs if isinstance(runs, list) else ())
        if isinstance(run, list) and len(run) == 3 and type(run[2]) is int and run[2] > 0
    ]
    return Cost(min(sum(counts), size // MIN_RECORD_BYTES), size)


def given(response: RemotingCommand) -> Cost:
    """Return the cost of what an answer gives out. Pure."""
    if response.code != ResponseCode.SUCCESS:
        return Cost(0, 0)
    view = memoryview(response.body)
    return Cost(_items(view, MIN_RECORD_BYTES), view.nbytes)


def _items(data: Buffer, min_bytes: int) -> int:
    """Return how many items stand one behind the other, each with its size in front."""
    view = memoryview(data).cast("B")
    count = offset = 0
    while offset + min_bytes <= len(view):
        size = int.from_bytes(view[offset : offset + 4], "big")
        if size < min_bytes:
            break
        count += 1
        offset += size
    return count


METERED_MESSAGES: Final = Meter(sends=sent_messages)
METERED_RECORDS: Final = Meter(sends=sent_records)
METERED_RECEIVE: Final = Meter(receives=True)
METERED_CONNECTION: Final = Meter()


# ------------------------------------------------------------------------------------- the edge


def note_client(connection: Connection, client_id: str) -> None:
    """Note the id that a client announces over its connection."""
    connection.attributes[_CLIENT_ID] = client_id


class Metering:
    """Holds, passes and refuses requests of one broker by its quotas.

    Attributes:
        buckets: What was counted.
    """

    def __init__(self, group: BrokerGroup, clock: Clock) -> None:
        self.buckets = QuotaBuckets()
        self._group = group
        self._clock = clock

    def metered(self, handler: Handler, meter: Meter) -> Handler:
        """Return *handler* with the quota of its sender before it."""
        state = self._group.state

        def handle(connection: Connection, command: RemotingCommand) -> Handled:
            if state.quotas:
                return self._decide(handler, meter, connection, command)
            return handler(connection, command)

        return handle

    def _decide(
        self, handler: Handler, meter: Meter, connection: Connection, command: RemotingCommand
    ) -> Handled:
        """Handle a request, now or later.

        Raises:
            QuotaExceededError: It is refused; the answer is held.
        """
        found = self._quota_of(connection)
        if found is None:
            return handler(connection, command)
        key, quota = found
        self._count_connection(connection, key, quota)
        if meter.sends is not None:
            # A follower refuses it, and names the leader.
            if self._group.leadership is not None:
                cost = meter.sends(command)
                verdict = self.buckets.send(key, quota, cost, self._clock.monotonic())
                if verdict.delay_s > 0:
                    connection.hold_answer(command, verdict.delay_s)
                _check(verdict, key)
            return handler(connection, command)
        if not meter.receives:
            return handler(connection, command)
        verdict = self.buckets.receive(key, quota, self._clock.monotonic())
        if not verdict.passes:
            connection.hold_answer(command, verdict.delay_s)
            _check(verdict, key)
        connection.when_answered(command, partial(self._count_given, key, quota))
        if verdict.delay_s > 0:
            # Noted now: the coroutine begins after other requests of the same chunk.
            accounts = admitted_account(connection), limited_account(connection)
            return self._later(handler, connection, command, accounts, verdict.delay_s)
        return handler(connection, command)

    def _quota_of(self, connection: Connection) -> tuple[str, QuotaConfig] | None:
        """Return the quota that counts for a request, and the key that it is counted under."""
        quotas = self._group.state.quotas
        account = admitted_account(connection)
        if account:
            key = quota_key(ACCOUNT, account)
            quota = quotas.get(key)
            # Tools of administrators have no quota unless it is one of their own.
            if quota is None and limited_account(connection):
                quota = quotas.get(quota_key(ACCOUNT, ""))
            return None if quota is None else (key, quota)
        host = connection.peer_address[0]
        client_id = connection.attributes.get(_CLIENT_ID) or host
        for name in (client_id, host):
            key = quota_key(CLIENT, name)
            if (quota := quotas.get(key)) is not None:
                return key, quota
        quota = quotas.get(quota_key(CLIENT, ""))
        return None if quota is None else (quota_key(CLIENT, client_id), quota)

    # ------------------------------------------------------------------------------ receives

    async def _later(
        self,
        handler: Handler,
        connection: Connection,
        command: RemotingCommand,
        accounts: tuple[str, str],
        delay_s: float,
    ) -> Answered:
        await self._clock.sleep(delay_s)
        admit_as(connection, *accounts)
        handled = handler(connection, command)
        return await handled if isinstance(handled, Awaitable) else handled

    def _count_given(self, key: str, quota: QuotaConfig, response: RemotingCommand) -> None:
        cost = given(response)
        if cost.size_bytes:
            self.buckets.received(key, quota, cost, self._clock.monotonic())

    # ------------------------------------------------------------------------------ connections

    def _count_connection(self, connection: Connection, key: str, quota: QuotaConfig) -> None:
        """Count a connection under its key, once.

        Raises:
            QuotaExceededError: There are as many as may be: it is closed.
        """
        counted: str | None = connection.attributes.get(_COUNTED)
        wanted = None if quota.connections is None else key
        if counted == wanted:
            return
        if wanted is not None and not self.buckets.connect(key, quota):
            text = f"{_shown(key)} has all its connections, {quota.connections}"
            connection.leave_soon(f"above its quota of connections: {text}")
            raise QuotaExceededError(text, CONNECT_AGAIN_MS, closes=True)
        if counted is not None:
            self.buckets.disconnect(counted)
        if _COUNTED not in connection.attributes:
            connection.on_close.append(self._closed)
        connection.attributes[_COUNTED] = wanted

    def _closed(self, connection: Connection) -> None:
        counted = connection.attributes.pop(_COUNTED, None)
        if counted is not None:
            self.buckets.disconnect(counted)


def _check(verdict: Verdict, key: str) -> None:
    if not verdict.passes:
        retry_after_ms = math.ceil(verdict.retry_after_s * 1000)
        raise QuotaExceededError(f"{_shown(key)} is above its quota", retry_after_ms)


def _shown(key: str) -> str:
    kind, _, name = key.partition(":")
    return f"{kind} {name}"
