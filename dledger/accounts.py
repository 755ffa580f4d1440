"""The accounts that count on a member: those of its file, and those of the log behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import Account, WhiteAddresses
from dledger.services.account_changes import account_of
from dledger.state.accounts import AccountConfig
from dledger.state.tables import StateTables

SPARE_ROWS: Final = 1_000
"""Rows of accounts that are not there any more and may be kept, before all are made again."""

_log = structlog.get_logger(__name__)


class BrokerAccounts:
    """Finds accounts: in the file first, then in what this member has applied."""

    def __init__(self, file: AccountStore, state: Callable[[], StateTables]) -> None:
        """Look up in *file* and in *state*, each time as they are then."""
        self._file = file
        self._state = state
        self._made: dict[str, tuple[AccountConfig, Account | None]] = {}
        self._white = ("", WhiteAddresses())

    def get(self, access_key: str) -> Account | None:
        """Return the account of that name, if there is one."""
        account = self._file.get(access_key)
        return account if account is not None else self._of_log(access_key)

    def is_white(self, host: str) -> bool:
        """Whether requests from *host* need no signature."""
        return self._file.is_white(host) or self._white_of_log().fits(host)

    def _of_log(self, access_key: str) -> Account | None:
        rows = self._state().accounts
        row = rows.get(access_key)
        if row is None:
            return None
        made = self._made.get(access_key)
        if made is not None and made[0] is row:
            return made[1]
        if len(self._made) > len(rows) + SPARE_ROWS:
            self._made.clear()
        try:
            account: Account | None = account_of(row)
        except ValueError as error:
            # Written by another version: refused, since what it forbids is not known.
            account = None
            _log.error("account_not_read", account=access_key, error=str(error))
        self._made[access_key] = (row, account)
        return account

    def _white_of_log(self) -> WhiteAddresses:
        text = self._state().white_addresses
        if text != self._white[0]:
            try:
                self._white = (text, WhiteAddresses(text))
            except ValueError as error:
                self._white = (text, WhiteAddresses())
                _log.error("white_addresses_not_read", error=str(error))
        return self._white[1]
