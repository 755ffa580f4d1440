"""The accounts in use, and the file they come from, read again while the daemon runs."""

from __future__ import annotations

from typing import Final

from commitlog.errors import ConfigError
from commitlog.seams import Disk
from remoting.access.account_file import parse_accounts
from remoting.access.accounts import AccountTable
from remoting.log import get_logger
from remoting.seams import Clock, Executor

RELOAD_INTERVAL_S: Final = 1.0
"""How soon a change of the file counts. Its content is compared: times of files have gaps."""

_log = get_logger(__name__)


class AccountStore:
    """Accounts from one file.

    Attributes:
        table: What counts now; replaced as a whole.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        """Read the file for the first time.

        Raises:
            ConfigError: It cannot be read, or not as accounts: nothing should be started.
        """
        self._disk = disk
        self._path = path
        self._content = self._read()
        self._complaint = ""
        self.table: AccountTable = parse_accounts(path, self._content)
        _log.info("accounts_read", path=path, accounts=len(self.table))

    def _read(self) -> bytes:
        try:
            return self._disk.read(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _changed(self) -> tuple[bytes, AccountTable] | None:
        """Read the file; return its new content, None when it is as before. Blocking."""
        content = self._read()
        if content == self._content:
            return None
        return content, parse_accounts(self._path, content)

    def take(self, changed: tuple[bytes, AccountTable] | None) -> None:
        """Let the accounts just read count from now on."""
        if changed is not None:
            self._content, self.table = changed
            _log.info("accounts_read", path=self._path, accounts=len(self.table))
        elif self._complaint:
            _log.info("accounts_as_before", path=self._path, accounts=len(self.table))
        self._complaint = ""

    def keep(self, error: ConfigError) -> None:
        """Keep the accounts, and say once why the file does not count."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.error(
                "accounts_kept",
                error=self._complaint,
                accounts=len(self.table),
                next_step="correct the file; until then its former content counts",
            )

    async def keep_reading(self, clock: Clock, executor: Executor) -> None:
        """Check the file until cancelled; a broken or missing one keeps the accounts there were."""
        while True:
            await clock.sleep(RELOAD_INTERVAL_S)
            try:
                changed = await executor.run(self._changed, kind="accounts")
            except ConfigError as error:
                self.keep(error)
            else:
                self.take(changed)
