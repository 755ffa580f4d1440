"""What a handler declares where it stands: request codes, limit, access rule, and whether it reads.

A handler is a method of a processor; `handles` notes the declaration on it and leaves it as it is,
so a request costs nothing more. From the declarations come the switchboard, the table of access
rules, the codes for the broker's own machine, and which handlers wait for queues and log to be as
the tables are. A code without a declaration has no handler: it is answered "not supported".

A handler raises what refuses a request: the connection answers with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from commitlog.errors import ConfigError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import not_leader
from dledger.processors.rights import Places, RuleOf
from remoting.access.accounts import Rule
from remoting.connection import Connection
from remoting.processor import Handled, Limiter
from remoting.processor_table import Handler, ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand

HandlerT = TypeVar("HandlerT", bound=Callable[..., object])

_DECLARATION: Final = "__handles__"


class Limit(StrEnum):
    """Which requests share a bound of open requests."""

    SEND = "send"
    PULL = "pull"
    REPLY = "reply"
    CLIENT = "client"
    ADMIN = "admin"
    RAFT_CHANGE = "raft change"
    SETTINGS = "settings"


MAX_OPEN: Final[Mapping[Limit, int]] = {
    # Send requests waiting for a majority: above what a group holds pending.
    Limit.SEND: 100_000,
    # Replies that requesters have not confirmed: each keeps its body until then.
    Limit.REPLY: 10_000,
    Limit.CLIENT: 100_000,
    # Everything else that is answered later; these are rare.
    Limit.ADMIN: 1_000,
    # Changes that wait for each other; a person requests one at a time.
    Limit.RAFT_CHANGE: 16,
    Limit.SETTINGS: 16,
}
"""Open requests of a kind, over all connections. A held pull is open until it is answered; the pull
processor bounds those itself, so the bound of pulls comes from its settings."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a handler declares.

    Attributes:
        codes: Requests it answers.
        limit: Which open requests they count with.
        rule: What an account needs for them.
        reads: It needs queues and log to be as the tables are; refused while a snapshot is
            refilled, because the tables are ahead of the log then.
        local: It erases data, or changes members or settings of durability and retention. Without
            access control it comes from the broker's own machine, unless `server.open_admin` is on.
        appends: It is decided on what is applied and what is in flight, and reads no message. All
            others see what was committed before they came.
    """

    codes: tuple[RequestCode, ...]
    limit: Limit
    rule: RuleOf
    reads: bool
    local: bool
    appends: bool


def handles(
    *codes: RequestCode,
    limit: Limit,
    rule: RuleOf,
    reads: bool = False,
    local: bool = False,
    appends: bool = False,
) -> Callable[[HandlerT], HandlerT]:
    """Declare that a method answers requests with *codes*; `Declaration` explains the rest."""
    declaration = Declaration(codes, limit, rule, reads, local, appends)

    def declare(method: HandlerT) -> HandlerT:
        setattr(method, _DECLARATION, declaration)
        return method

    return declare


def declared(processors: Iterable[type]) -> Iterator[tuple[str, Declaration]]:
    """Yield name and declaration of each handler of these classes."""
    for processor in processors:
        for name, member in vars(processor).items():
            declaration = getattr(member, _DECLARATION, None)
            if declaration is not None:
                yield name, declaration


def codes_of(*processors: type) -> frozenset[RequestCode]:
    """Return the request codes that these classes answer."""
    return frozenset(code for _, found in declared(processors) for code in found.codes)


def rules_of(processors: Iterable[type], places: Places) -> dict[int, Rule]:
    """Return the access rule of each request code that these classes answer."""
    return {
        int(code): declaration.rule
        if isinstance(declaration.rule, Rule)
        else declaration.rule(places)
        for _, declaration in declared(processors)
        for code in declaration.codes
    }


def local_codes(processors: Iterable[type]) -> frozenset[RequestCode]:
    """Return the codes that come from the broker's own machine where there is no access control."""
    return frozenset(
        code
        for _, declaration in declared(processors)
        if declaration.local
        for code in declaration.codes
    )


def handlers_of(
    processors: Iterable[object], limiters: Mapping[Limit, Limiter], group: BrokerGroup
) -> dict[RequestCode, tuple[Handler, Limiter]]:
    """Return the switchboard: for each declared code its handler and its limiter.

    Raises:
        ConfigError: Two handlers declare the same code.
    """
    handlers: dict[RequestCode, tuple[Handler, Limiter]] = {}
    for processor in processors:
        for name, declaration in declared([type(processor)]):
            handler: Handler = getattr(processor, name)
            if not declaration.appends:
                handler = _when_applied(group, handler)
            if declaration.reads:
                handler = _when_readable(group, handler)
            for code in declaration.codes:
                if code in handlers:
                    raise ConfigError(f"request code {code} has a handler already")
                handlers[code] = (handler, limiters[declaration.limit])
    return handlers


def register(
    table: ProcessorTable, handlers: Mapping[RequestCode, tuple[Handler, Limiter]]
) -> None:
    """Put *handlers* into *table*."""
    for code, (handler, limiter) in handlers.items():
        table.register(code, handler, limiter)


def _when_applied(group: BrokerGroup, handler: Handler) -> Handler:
    """Apply first what is committed: the answer reflects every message that was answered."""

    def handle(connection: Connection, command: RemotingCommand) -> Handled:
        group.catch_up()
        return handler(connection, command)

    return handle


def _when_readable(group: BrokerGroup, handler: Handler) -> Handler:
    """Refuse while a snapshot is being refilled: the tables are ahead of the log."""

    def handle(connection: Connection, command: RemotingCommand) -> Handled:
        if not group.readable:
            raise not_leader(group)
        return handler(connection, command)

    return handle
