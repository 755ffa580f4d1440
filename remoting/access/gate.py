"""The check of every request of a port, put around its handlers when they are registered.

Nothing can be registered past it: `ProcessorTable` asks the gate for each handler. Without access
control there is no gate, and handlers are called as they are.

Spec: semantics fact sheet, section 9: texts and order of the checks are RocketMQ's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from remoting.access.account_store import AccountStore
from remoting.access.accounts import Account, Right
from remoting.access.rules import ADMIN, Rule
from remoting.connection import Connection
from remoting.errors import AccessRefusedError
from remoting.processor import Handled, Handler
from remoting.protocol.command import RemotingCommand
from remoting.protocol.signature import ACCESS_KEY, is_signed_by
from remoting.seams import Clock

REFUSALS_LOGGED_EVERY_S: Final = 1.0
"""One line for so long: whoever guesses keys does not write our logs."""

SHOWN_CHARACTERS: Final = 64
"""So much of a name that somebody unknown sent is shown."""

_log = structlog.get_logger()


class AccessGate:
    """Lets a request through to its handler, or refuses it before anything has happened.

    Attributes:
        refused: Requests refused so far.
    """

    def __init__(self, accounts: AccountStore, rules: Mapping[int, Rule], clock: Clock) -> None:
        """Make a gate.

        Args:
            rules: Rule of each request code; a code without one is for administrators.
        """
        self._accounts = accounts
        self._rules = rules
        self._clock = clock
        self.refused = 0
        self._refused_unsaid = 0
        self._said_at_s: float | None = None

    def guard(self, code: int, handler: Handler) -> Handler:
        """Return *handler* with the check of *code* before it."""
        rule = self._rules.get(code, ADMIN)

        def guarded(connection: Connection, command: RemotingCommand) -> Handled:
            self.admit(connection.peer_address[0], command, rule)
            return handler(connection, command)

        return guarded

    def admit(self, host: str, command: RemotingCommand, rule: Rule) -> None:
        """Let a request pass.

        Raises:
            AccessRefusedError: It may not pass; nothing was done.
            BadRequestError: Its signature is right, and what it asks for cannot be read.
        """
        try:
            self._admit(host, command, rule)
        except AccessRefusedError as error:
            self._note(host, command, error)
            raise

    def _admit(self, host: str, command: RemotingCommand, rule: Rule) -> None:
        table = self._accounts.table
        if table.white.fits(host):
            return
        access_key = command.ext.get(ACCESS_KEY)
        if not isinstance(access_key, str) or not access_key:
            raise AccessRefusedError("No accessKey is configured")
        account = table.get(access_key)
        if account is None:
            raise AccessRefusedError(f"No acl config for {access_key[:SHOWN_CHARACTERS]}")
        if account.white.fits(host):
            return
        if not is_signed_by(command, account.secret_key):
            raise AccessRefusedError(f"Check signature failed for accessKey={access_key}")
        if rule.admin and not account.is_admin:
            raise AccessRefusedError(
                f"Need admin permission for request code={command.code},"
                f" but accessKey={access_key} is not"
            )
        if rule.rights is not None:
            _demand(account, rule.rights(command))

    def _note(self, host: str, command: RemotingCommand, error: AccessRefusedError) -> None:
        self.refused += 1
        self._refused_unsaid += 1
        now = self._clock.monotonic()
        if self._said_at_s is not None and now - self._said_at_s < REFUSALS_LOGGED_EVERY_S:
            return
        _log.warning(
            "access_refused",
            peer=host,
            code=command.code,
            access_key=str(command.ext.get(ACCESS_KEY, ""))[:SHOWN_CHARACTERS],
            reason=str(error),
            times=self._refused_unsaid,
        )
        self._said_at_s, self._refused_unsaid = now, 0


def _demand(account: Account, rights: Iterable[Right]) -> None:
    for right in rights:
        if not account.allows(right):
            kind = "group" if right.is_group else "topic"
            raise AccessRefusedError(f"No default permission for {kind}: {right.name}")
