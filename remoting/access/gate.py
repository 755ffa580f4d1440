"""The check of every request of a port, put around its handlers when they are registered.

Nothing can be registered past it: `ProcessorTable` asks the gate for each handler. Without access
control there is no gate, and handlers are called as they are, but for `LocalAdmin`: unless
`open_admin` is on, requests that erase data or change the cluster come from this machine.

Spec: docs/internals/protocol/semantics.md, section 9: texts and order of the checks are RocketMQ's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dledger.remoting.access.accounts import ADMIN, Account, AccountSource, Permission, Right, Rule
from dledger.remoting.addresses import is_loopback
from dledger.remoting.connection import Connection
from dledger.remoting.errors import AccessRefusedError
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.log import get_logger
from dledger.remoting.processor_table import Handler, ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.signature import (
    ACCESS_KEY,
    CHALLENGE,
    CHALLENGE_BYTES,
    SIGNED_TOO_LONG_AGO,
    Freshness,
    is_fresh_form,
    is_signed_by,
)
from dledger.remoting.seams import Clock, Rng

REFUSALS_LOGGED_EVERY_S: Final = 1.0
"""One line in this time: a client that guesses keys does not fill the log."""

SHOWN_CHARACTERS: Final = 64
"""Length up to which a name that an unknown client sent is shown."""

CHALLENGES_OPEN_MAX: Final = 1024
"""Requests for a challenge open at a time; each is answered before its handler returns."""

UNNAMED: Final = Account(
    "", "", default_topic=Permission.PUB | Permission.SUB, default_group=Permission.SUB
)
"""What a request without an account may do from a white address: what a client does, on every
topic and group that clients may use. What is for administrators wants an account that is one."""

_FRESHNESS: Final = "signature freshness"
"""Attribute of a connection that has a challenge."""

_ADMITTED: Final = "admitted account"
"""Attribute of a connection: whose rights counted for the request that is handled now."""

_LIMITED: Final = "limited account"
"""Attribute of a connection: the same, empty where it is an administrator's."""

_log = get_logger(__name__)


def admitted_account(connection: Connection) -> str:
    """Return the account whose rights counted for the request that is handled now.

    Call it before the handler returns or waits. Empty: there is no access control, or the request
    named no account.
    """
    account: str = connection.attributes.get(_ADMITTED, "")
    return account


def limited_account(connection: Connection) -> str:
    """Return the account that answers for what the request makes; as `admitted_account`.

    Empty: also for an administrator, which creates things for others.
    """
    account: str = connection.attributes.get(_LIMITED, "")
    return account


@dataclass(eq=False, repr=False)
class AccessGate:
    """Lets a request through to its handler, or refuses it before anything has happened."""

    _accounts: AccountSource
    _rules: Mapping[int, Rule]
    _clock: Clock
    _rng: Rng

    def __post_init__(self) -> None:
        self.refused = 0
        self._refused_unsaid = 0
        self._said_at_s: float | None = None

    def guard(self, code: int, handler: Handler) -> Handler:
        """Return *handler* with the check of *code* before it."""
        rule = self._rules.get(code, ADMIN)

        def guarded(connection: Connection, command: RemotingCommand) -> Handled:
            self.admit(connection, command, rule)
            return handler(connection, command)

        return guarded

    def challenge(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer with the challenge of this connection, made at its first request for one."""
        fresh = connection.attributes.get(_FRESHNESS)
        if fresh is None:
            text = self._rng.randbytes(CHALLENGE_BYTES).hex()
            fresh = Freshness(text.encode(), self._clock.monotonic())
            connection.attributes[_FRESHNESS] = fresh
        return response_to(command, 0, None, {CHALLENGE: fresh.challenge.decode()})

    def admit(self, connection: Connection, command: RemotingCommand, rule: Rule) -> None:
        """Let a request pass.

        Raises:
            AccessRefusedError: It may not pass; nothing was done.
            BadRequestError: Its signature is right, and what it asks for cannot be read.
        """
        try:
            self._admit(connection, command, rule)
        except AccessRefusedError as error:
            self._note(connection.peer_address[0], command, error)
            raise

    def _admit(self, connection: Connection, command: RemotingCommand, rule: Rule) -> None:
        account = self._account(connection, command)
        connection.attributes[_ADMITTED] = account.access_key
        connection.attributes[_LIMITED] = "" if account.is_admin else account.access_key
        if rule.admin and not account.is_admin:
            raise AccessRefusedError(
                f"Need admin permission for request code={command.code},"
                f" but accessKey={account.access_key or 'none'} is not"
            )
        if rule.rights is not None:
            _demand(account, rule.rights(command), connection.peer_address[0])

    def _account(self, connection: Connection, command: RemotingCommand) -> Account:
        """Return whose rights count: proved by a signature, or named from a white address."""
        host = connection.peer_address[0]
        is_white = self._accounts.is_white(host)
        access_key = command.ext.get(ACCESS_KEY)
        if not isinstance(access_key, str) or not access_key:
            if is_white:
                return UNNAMED
            raise AccessRefusedError("No accessKey is configured")
        account = self._accounts.get(access_key)
        if account is not None and not account.is_enabled:
            account = None
        if account is not None and (is_white or account.white.fits(host)):
            return account
        # An account that is not there is looked at like one whose signature is wrong, and answered
        # the same: else the answer, or its time, would say which names there are.
        self._check_signature(connection, command, account or _absent(access_key))
        if account is None:
            raise AccessRefusedError(_failed(access_key))
        return account

    def _check_signature(
        self, connection: Connection, command: RemotingCommand, account: Account
    ) -> None:
        failed = _failed(account.access_key)
        if not is_fresh_form(command):
            if not is_signed_by(command, account.secret_key):
                raise AccessRefusedError(failed)
            return
        fresh: Freshness | None = connection.attributes.get(_FRESHNESS)
        if fresh is None:
            raise AccessRefusedError(f"{failed}: this connection has no challenge")
        now_s = self._clock.monotonic()
        if fault := fresh.fault_of(command, account.secret_key, now_s):
            if fault is SIGNED_TOO_LONG_AGO:
                # The next connection counts from a challenge of its own.
                connection.close(fault)
            raise AccessRefusedError(f"{failed}: {fault}")

    def _note(self, host: str, command: RemotingCommand, error: AccessRefusedError) -> None:
        self.refused += 1
        self._refused_unsaid += 1
        now = self._clock.monotonic()
        if self._said_at_s is not None and now - self._said_at_s < REFUSALS_LOGGED_EVERY_S:
            return
        access_key = str(command.ext.get(ACCESS_KEY, ""))
        _log.warning(
            "access_refused",
            peer=host,
            code=command.code,
            access_key=access_key[:SHOWN_CHARACTERS],
            has_account=self._accounts.get(access_key) is not None,
            reason=str(error),
            times=self._refused_unsaid,
        )
        self._said_at_s, self._refused_unsaid = now, 0


def _failed(access_key: str) -> str:
    return f"Check signature failed for accessKey={access_key[:SHOWN_CHARACTERS]}"


def _absent(access_key: str) -> Account:
    """Return what stands in for an account that is not there while a signature is looked at."""
    return Account(access_key, secret_key="\0" * 16)


def _demand(account: Account, rights: Iterable[Right], host: str) -> None:
    for right in rights:
        if not account.allows(right, host):
            kind = "group" if right.is_group else "topic"
            raise AccessRefusedError(f"No default permission for {kind}: {right.name}")


def guarded_table(gate: AccessGate) -> ProcessorTable:
    """Return an empty table behind *gate*, which answers the one request that needs no signature.

    That one asks for the challenge of its connection.
    """
    table = ProcessorTable(gate.guard)
    limiter = Limiter("signature challenge", CHALLENGES_OPEN_MAX)
    table.register_free(RequestCode.SIGNATURE_CHALLENGE, gate.challenge, limiter)
    return table


# --------------------------------------------------------------------------- without access control


class LocalAdmin:
    """Refuses some requests of other machines before anything has happened."""

    def __init__(self, codes: Collection[int]) -> None:
        """Make a guard for *codes*; requests of other codes are not looked at."""
        self._codes = frozenset(codes)
        self._logged: set[int] = set()
        self.refused = 0

    def guard(self, code: int, handler: Handler) -> Handler:
        """Return *handler*, with the check before it if *code* is one of those guarded."""
        if code not in self._codes:
            return handler

        def guarded(connection: Connection, command: RemotingCommand) -> Handled:
            self.admit(connection.peer_address[0], code)
            return handler(connection, command)

        return guarded

    def admit(self, host: str, code: int) -> None:
        """Let a request pass.

        Raises AccessRefusedError: it came from another machine; nothing was done.
        """
        if is_loopback(host):
            return
        self.refused += 1
        name = RequestCode(code).name
        if code not in self._logged:
            # Once for each code: the table is small, and a stranger does not fill the log.
            self._logged.add(code)
            _log.warning(
                "remote_admin_refused",
                peer=host,
                request=name,
                next_step="set aclEnable with accounts, or openAdmin=true",
            )
        raise AccessRefusedError(
            f"{name} ({code}) erases data or changes the cluster. Without access control it is "
            f"taken from the daemon's own machine only: run the tool there, or set aclEnable=true "
            f"with an account for the tool, or openAdmin=true"
        )


def processor_table(
    accounts: AccountSource | None,
    rules: Mapping[int, Rule],
    local_codes: Collection[int],
    clock: Clock,
    rng: Rng,
    *,
    open_admin: bool,
) -> tuple[ProcessorTable, AccessGate | LocalAdmin | None]:
    """Return an empty table that is guarded as the settings of a daemon ask for, and its guard.

    Args:
        accounts: Of all that sign; None: there is no access control.
        local_codes: Without it these come from the daemon's own machine, unless *open_admin*.
    """
    if accounts is not None:
        gate = AccessGate(accounts, rules, clock, rng)
        return guarded_table(gate), gate
    if open_admin:
        return ProcessorTable(None), None
    local = LocalAdmin(local_codes)
    return ProcessorTable(local.guard), local
