"""Connections to brokers, what each broker understands, and the group it belongs to.

A NameServer of ours states with a route which group each broker name belongs to; a broker of ours
states its own. Where both do and differ, nothing is sent: an acknowledgement of another group is
worth nothing. NameServers and brokers of RocketMQ state no group and are trusted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import trio

from dledger.client.core.client_state import Announcements
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.retry import is_retriable
from dledger.commitlog.errors import LocalProtocolError
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import (
    ConnectFailedError,
    ConnectionLostError,
    RemotingError,
    TooManyInFlightError,
)
from dledger.remoting.errors import RequestTimedOutError as CallTimedOutError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand, SerializeType, request
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.own_fields import NAMES_STALE_FIELD
from dledger.remoting.protocol.signature import SIGNED_TOO_LONG_AGO

_log = get_logger(__name__)


@dataclass(slots=True)
class Link:
    """A broker connection and what the broker behind it understands.

    Attributes:
        connection: Live when it was handed out.
        cbor: It reads CBOR headers.
        records: It takes SEND_RECORDS.
        bulk_pull: It may take BULK_PULL; cleared when it refuses.
        idempotent: It distinguishes a repeated send from a new one.
        names_stale: It names the stale receipts of a batch of acknowledgements.
        identity: Of the broker's group, as it reports; empty: not reported.
        refused: Why it does not report anything of this; empty: it does not know the question.
        heard: The newest heartbeat it has answered.
        announced: The producer groups of this client that were in it.
    """

    address: str
    connection: Connection
    cbor: bool
    records: bool
    bulk_pull: bool
    idempotent: bool = False
    names_stale: bool = False
    identity: str = ""
    refused: str = ""
    heard: bytes = b""
    announced: frozenset[str] = frozenset()

    @property
    def serialize(self) -> SerializeType:
        """Header encoding for requests over it."""
        return SerializeType.CBOR if self.cbor else SerializeType.JSON


def truth(value: object) -> bool:
    """Return whether a header field is true, in either encoding."""
    return value is True or (isinstance(value, str) and value.lower() == "true")


_NOT_NOW: Final = frozenset({ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY})
"""What a broker answers that is shutting down, or has too many requests open."""

KEPT_S: Final = 150.0
"""An identity holds for so long after the NameServers have stopped to state it: after they were
started again, a stranger may be registered under the name before the group is."""

SILENT_S: Final = 1.0
"""A former leader that sent nothing for so long is taken to stand still."""

NAMES_MAX: Final = 10_000
"""Broker names with an identity; a NameServer knows no more brokers."""


@dataclass(slots=True)
class _Known:
    identity: str
    unsaid_since_s: float | None = None


class GroupIdentities:
    """Broker name → identity of its group, as the NameServers state it."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def take(self, stated: Mapping[str, str], names: Iterable[str], now_s: float) -> None:
        """Take what came with a route."""
        for name in names:
            identity = stated.get(name)
            known = self._known.get(name)
            if identity:
                if known is not None and known.identity != identity:
                    _log.warning(
                        "group_replaced", broker=name, was=known.identity, identity=identity
                    )
                if known is not None or len(self._known) < NAMES_MAX:
                    self._known[name] = _Known(identity)
            elif known is None:
                continue
            elif known.unsaid_since_s is None:
                known.unsaid_since_s = now_s
            elif now_s - known.unsaid_since_s > KEPT_S:
                del self._known[name]

    def refusal(self, broker_name: str, identity: str) -> str:
        """Return why nothing may be sent to a broker under that name; empty: it may.

        *identity*: as the broker reports; empty: not reported.
        """
        known = self._known.get(broker_name)
        if known is None or identity == known.identity:
            return ""
        said = f"is of the group {identity}" if identity else "names no group"
        return f"it {said}, and {broker_name} is the group {known.identity}; nothing was sent"


def stated_identities(text: object) -> dict[str, str]:
    """Return what a NameServer's field holds; empty without one, or when it cannot be read."""
    if not isinstance(text, str):
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        return {}


def not_let_in(address: str, answer: RemotingCommand) -> ClientError | None:
    """Return the error when *answer* to the question for capabilities refuses the account."""
    remark = answer.remark or ""
    is_for_good = answer.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED and (
        outcome_of(answer) == "not_stored" and not is_retriable(answer)
    )
    if not is_for_good or remark.endswith(SIGNED_TOO_LONG_AGO):
        return None
    return RequestFailedError(_refused(address, answer), code=answer.code, remark=remark)


def _refused(address: str, answer: RemotingCommand) -> str:
    remark = answer.remark or ""
    return f"broker {address}: refused with code {answer.code}: {remark}; nothing was sent"


@dataclass(eq=False, repr=False)
class Links:
    """The connections of one client to brokers; `use` comes before the first one."""

    _client_id: str
    _identities: GroupIdentities
    _announcements: Announcements
    _rpc_timeout_s: float
    opened: dict[str, Link] = field(default_factory=dict)
    is_closed: bool = True
    _remoting: RemotingClient | None = None
    _opening: dict[str, trio.Lock] = field(default_factory=dict)

    def use(self, remoting: RemotingClient) -> None:
        """Connect through *remoting* from now on."""
        self._remoting = remoting
        self.is_closed = False

    def stop(self) -> None:
        """Open no further connection; those that are open stay so until `close`."""
        self.is_closed = True

    def close(self) -> None:
        """Break every connection at once."""
        self.is_closed = True
        if self._remoting is not None:
            self._remoting.close()

    def _link_ended(self, link: Link, _ended: Connection) -> None:
        # Brokers come and go under ever new addresses.
        if self.opened.get(link.address) is link:
            del self.opened[link.address]
        if not self.is_closed:
            self._announcements.connection_ended()

    def end_silent(self, former: str) -> None:
        """Break the connection to a former leader that answers nothing: calls over it end now.

        One that only moved its leadership answers what it got, and loses no more than polls.
        """
        link = self.opened.get(former)
        if link is None:
            return
        connection = link.connection
        if connection.pending_calls and connection.silent_for_s >= SILENT_S:
            connection.close("it leads no longer, and is silent")

    async def open(self, address: str, timeout_s: float, *, group: str = "") -> Link:
        """Return a live connection to a broker, with what it understands.

        The first use of a connection asks for the broker's capabilities.

        Args:
            group: Broker name that it is used for; empty: whatever broker is there.

        Raises:
            BrokerUnreachableError: Not within *timeout_s*, or the broker there shuts down, is busy,
                or belongs to another group; nothing was sent but the question.
            RequestFailedError: The broker does not let this account in, and will not later.
            ClientClosedError: The instance is closed.
        """
        ready = self.ready(address, group)
        if ready is not None:
            return ready
        link = await self._open(address, timeout_s)
        refusal = self._identities.refusal(group, link.identity) if group else ""
        if refusal:
            # Asked again at the next use: it may be another process by then.
            if self.opened.get(address) is link:
                del self.opened[address]
            link.connection.close("the broker belongs to another group")
            raise BrokerUnreachableError(link.refused or f"broker {address}: {refusal}")
        return link

    def ready(self, address: str, group: str) -> Link | None:
        """Return the connection to a broker if one is open and may be used for *group*."""
        link = self.opened.get(address)
        if link is None or link.connection.is_closed:
            return None
        if group and self._identities.refusal(group, link.identity):
            return None
        return link

    @asynccontextmanager
    async def _alone(self, address: str) -> AsyncIterator[None]:
        lock = self._opening.setdefault(address, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and self._opening.get(address) is lock:
                del self._opening[address]

    async def _open(self, address: str, timeout_s: float) -> Link:
        link = self.opened.get(address)
        if link is not None and not link.connection.is_closed:
            return link
        if self._remoting is None or self.is_closed:
            raise ClientClosedError(f"client {self._client_id} is closed; nothing was sent")
        with trio.move_on_after(timeout_s):
            async with self._alone(address):
                link = self.opened.get(address)
                if link is not None and not link.connection.is_closed:
                    return link
                try:
                    connection = await self._remoting.connection(address, timeout_s)
                    answer = await connection.invoke(request(RequestCode.CAPABILITIES), timeout_s)
                except (RemotingError, LocalProtocolError) as error:
                    # The latter: what is registered as its address is none.
                    raise BrokerUnreachableError(f"broker {address}: {error}") from error
                if answer.code in _NOT_NOW:
                    # What it understands is not known; it is asked again at the next use.
                    raise BrokerUnreachableError(
                        f"broker {address} takes nothing now: code {answer.code}"
                        f" {answer.remark or ''}"
                    )
                if refusal := not_let_in(address, answer):
                    connection.close("the account is not let in")
                    raise refusal
                ours = answer.code == ResponseCode.SUCCESS
                is_old = answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                link = self.opened[address] = Link(
                    address,
                    connection,
                    cbor=ours and truth(answer.ext.get("cbor")),
                    records=ours and truth(answer.ext.get("records")),
                    bulk_pull=ours,
                    idempotent=ours and truth(answer.ext.get("idempotent")),
                    names_stale=ours and truth(answer.ext.get(NAMES_STALE_FIELD)),
                    identity=str(answer.ext.get("groupIdentity") or "") if ours else "",
                    refused="" if ours or is_old else _refused(address, answer),
                )
                connection.on_close.append(partial(self._link_ended, link))
                self._announcements.wake()
                return link
        raise BrokerUnreachableError(f"broker {address} does not answer within {timeout_s} s")

    async def ask(
        self,
        address: str,
        code: int,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        group: str = "",
    ) -> RemotingCommand:
        """Ask one broker once and return its answer, whatever its code.

        Args:
            group: Broker name that it is asked for; empty: whatever broker is there.
        Raises:
            BrokerUnreachableError: Nothing was sent.
            RequestFailedError: The broker does not let this account in; nothing was sent.
            RequestTimedOutError: Sent, but no answer; what was asked for may have been done.
        """
        timeout_s = self._rpc_timeout_s if timeout_s is None else timeout_s
        link = await self.open(address, timeout_s, group=group)
        try:
            return await link.connection.invoke(
                request(code, ext, body, serialize=link.serialize), timeout_s
            )
        except (CallTimedOutError, ConnectionLostError) as error:
            if error.outcome == "not_stored":
                raise BrokerUnreachableError(f"broker {address}: {error}") from error
            raise RequestTimedOutError(f"broker {address}: {error}") from error
        except (TooManyInFlightError, ConnectFailedError) as error:
            raise BrokerUnreachableError(f"broker {address}: {error}") from error
