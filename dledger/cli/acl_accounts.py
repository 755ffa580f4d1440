"""Accounts of a file, and those in the log of every broker group: the same is done with both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dledger.output import CliError, ExitCode, Output, note, show

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.access.accounts import Account, AccountTable, Permission, Right
    from dledger.remoting.protocol.access_bodies import AclInfo, PlainAccessConfig
    from dledger.state.accounts import PolicyConfig

COLUMNS: Final = ("account", "admin", "white", "default_topic", "default_group", "topics", "groups")

Lines = Mapping[str, "Permission"]
Changes = Mapping[str, "Permission | None"]
"""Lines to set by the name of a topic or a group; None removes one."""

LOG_COLUMNS: Final = ("broker", *COLUMNS[:2], "enabled", *COLUMNS[2:], "policies")

NOT_SHOWN: Final = "not shown"
"""Stands for a secret: no answer has one."""


def may_all(account: Account, asked: Sequence[Right], host: str, broker: str) -> bool:
    """Show which rights *account* has; return whether it has all."""
    refused = [right for right in asked if not (account.is_enabled and account.allows(right, host))]
    for right in asked:
        kind = "group" if right.is_group else "topic"
        verdict = "may not" if right in refused else "may"
        note(
            f"{_where(broker)}{account.access_key} {verdict} {right.permission} {kind} {right.name}"
        )
    return not refused


class FileAccounts:
    """The accounts of one file, which daemons read again by themselves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def show(self, output: Output) -> None:
        """Print them."""
        table = read_accounts(self._path)
        show(output, f"Accounts in {self._path}", [account_row(each) for each in table], COLUMNS)
        if table.white and output == "table":
            note(f"everybody from {table.white.text} may do everything")

    def check_all(self) -> None:
        """Print how many there are. Raises ConfigError: the file is none of accounts."""
        note(f"{self._path}: {len(read_accounts(self._path))} accounts")

    async def named(self, name: str) -> dict[str, Account]:
        """Return an account. Raises CliError: there is none."""
        return {"": self._account(read_accounts(self._path), name)}

    async def add(self, account: Account, *, is_drawn: bool) -> None:
        """Add an account; its secret is printed when it *is_drawn*."""
        from dledger.remoting.access.accounts import KEY_LENGTH_MIN, AccountTable

        name = account.access_key
        table = read_accounts(self._path) if self._path.exists() else AccountTable()
        if table.get(name) is not None:
            raise CliError(
                f"{self._path}: account {name} exists already", next_step="dledger acl grant"
            )
        if not name or len(account.secret_key) < KEY_LENGTH_MIN:
            raise CliError(
                f"an account has a name, and a secret key of at least {KEY_LENGTH_MIN} characters",
                exit_code=ExitCode.USAGE,
            )
        write_accounts(self._path, table, {name: account})
        if is_drawn:
            sys.stdout.write(f"{account.secret_key}\n")

    async def change(self, name: str, topics: Changes, groups: Changes) -> None:
        """Set lines of an account."""
        table = read_accounts(self._path)
        account = self._account(table, name)
        changed = replace(
            account,
            topics=changed_lines(account.topics, topics),
            groups=changed_lines(account.groups, groups),
        )
        write_accounts(self._path, table, {name: changed})

    async def remove(self, name: str) -> None:
        """Remove an account."""
        table = read_accounts(self._path)
        self._account(table, name)
        write_accounts(self._path, table, {name: None})

    def _account(self, table: AccountTable, name: str) -> Account:
        account = table.get(name)
        if account is None:
            raise CliError(f"account {name} does not exist", next_step="see dledger acl ls")
        return account


def account_row(account: Account) -> dict[str, Any]:
    """Return what is shown of an account. Pure."""
    may_all = account.is_admin and not (account.topics or account.groups)
    return {
        "account": account.access_key,
        "admin": account.is_admin,
        "white": account.white.text or None,
        "default_topic": "everything" if may_all else str(account.default_topic),
        "default_group": "everything" if may_all else str(account.default_group),
        "topics": _shown(account.topics),
        "groups": _shown(account.groups),
    }


def _shown(lines: Lines) -> str | None:
    return ", ".join(f"{name}={permission}" for name, permission in lines.items()) or None


def changed_lines(lines: Lines, changes: Changes, broker: str = "") -> dict[str, Permission]:
    """Return *lines* with *changes*. Raises CliError: one that is to go is not there."""
    for name, permission in changes.items():
        if permission is None and name not in lines:
            where = _where(broker)
            raise CliError(f"{where}the account has no line about {name}; nothing was changed")
    merged = {**lines, **changes}
    return {name: permission for name, permission in merged.items() if permission is not None}


def _where(broker: str) -> str:
    return f"{broker}: " if broker else ""


def read_accounts(path: Path) -> AccountTable:
    """Return what a file of accounts holds. Raises CliError: it cannot be read; a usage error."""
    from dledger.remoting.access.account_file import parse_accounts

    try:
        return parse_accounts(str(path), path.read_bytes())
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", exit_code=ExitCode.USAGE) from None


def write_accounts(path: Path, table: AccountTable, changes: Mapping[str, Account | None]) -> None:
    """Replace the file as a whole, readable for its owner alone unless it was for others before.

    Raises CliError: it is not ours to write, or cannot be written; the old one stays.
    """
    from dledger.remoting.access.account_file import accounts_document, is_toml, parse_accounts

    if not is_toml(str(path)):
        raise CliError(
            f"{path}: only .toml files are written",
            next_step=f"dledger acl convert {path} {path.with_suffix('.toml')}",
            exit_code=ExitCode.USAGE,
        )
    merged: dict[str, Account | None] = {**table.accounts, **changes}
    accounts = {name: account for name, account in merged.items() if account is not None}
    text = accounts_document(replace(table, accounts=accounts))
    # What daemons would refuse is not written.
    parse_accounts(str(path), text.encode())
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(mode)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CliError(f"{path}: cannot be written: {error.strerror}") from None


class Listed(NamedTuple):
    """An account of one broker group, and its policies as people read them."""

    account: Account
    policies: str | None


class LogAccounts:
    """The accounts in the log of every broker group; a change goes to each."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def _by_broker(self) -> dict[str, dict[str, Listed]]:
        """Return the accounts of each broker group by their names; secrets are not among them."""
        configs, users = await self._admin.accounts(), await self._admin.users()
        policies = await self._admin.policies()
        found: dict[str, dict[str, Listed]] = {}
        for broker, config in configs.items():
            known = {user.username: user for user in users.get(broker, [])}
            disabled = {name for name, user in known.items() if user.user_status == "disable"}
            entries = {acl.subject: _policies(acl) for acl in policies.get(broker, [])}
            found[broker] = {
                plain.access_key: _listed(
                    plain,
                    plain.access_key not in disabled,
                    entries.get(f"User:{plain.access_key}", ()),
                )
                for plain in config.plain_access_configs
            }
        return found

    async def show(self, output: Output) -> None:
        """Print them."""
        rows = [
            {
                "broker": broker,
                **account_row(listed.account),
                "enabled": listed.account.is_enabled,
                "policies": listed.policies,
            }
            for broker, every in (await self._by_broker()).items()
            for listed in every.values()
        ]
        white = {
            name: each.global_white_addrs for name, each in (await self._admin.accounts()).items()
        }
        show(output, "Accounts in the log", rows, LOG_COLUMNS)
        if output == "table":
            for broker, patterns in white.items():
                if patterns:
                    note(f"{broker}: no signature is needed from {', '.join(patterns)}")
            note("accounts of files that server.acl_file names are not among them, and count first")

    def check_all(self) -> None:
        """Raise CliError: brokers have checked them; a usage error."""
        raise CliError("name an account to check", exit_code=ExitCode.USAGE)

    async def named(self, name: str) -> dict[str, Account]:
        """Return an account of each broker group. Raises CliError: one has none of that name."""
        found: dict[str, Account] = {}
        for broker, every in (await self._by_broker()).items():
            if name not in every:
                raise CliError(
                    f"{broker}: account {name} does not exist in the log",
                    next_step="see dledger acl ls --cluster",
                )
            found[broker] = every[name].account
        return found

    async def add(self, account: Account, *, is_drawn: bool) -> None:
        """Make an account in every broker group; print a drawn secret once."""
        name = account.access_key
        for broker, every in (await self._by_broker()).items():
            if name in every:
                raise CliError(
                    f"{broker}: account {name} exists already",
                    next_step="dledger acl grant --cluster",
                )
        with _shown_once(account.secret_key if is_drawn else None):
            await self._admin.put_account(
                name,
                secret_key=account.secret_key,
                admin=account.is_admin,
                white_address=account.white.text,
                default_topic=str(account.default_topic),
                default_group=str(account.default_group),
                topics={topic: str(perm) for topic, perm in account.topics.items()},
                groups={group: str(perm) for group, perm in account.groups.items()},
            )

    async def change(self, name: str, topics: Changes, groups: Changes) -> None:
        """Set lines of an account in every broker group."""
        # All of them are checked before the first one is changed.
        wanted = {
            broker: (
                account.is_admin,
                changed_lines(account.topics, topics, broker),
                changed_lines(account.groups, groups, broker),
            )
            for broker, account in (await self.named(name)).items()
        }
        for broker, (is_admin, of_topics, of_groups) in wanted.items():
            await self._admin.put_account(
                name,
                admin=is_admin,
                topics={topic: str(perm) for topic, perm in of_topics.items()},
                groups={group: str(perm) for group, perm in of_groups.items()},
                broker_names=(broker,),
            )

    async def remove(self, name: str) -> None:
        """Delete an account in every broker group."""
        await self.named(name)
        await self._admin.delete_account(name)

    async def set_secret(self, name: str, secret: str, *, is_drawn: bool) -> None:
        """Give an account another secret in every broker group; print a drawn one once."""
        await self.named(name)
        with _shown_once(secret if is_drawn else None):
            await self._admin.update_user(name, password=secret)


def _listed(plain: PlainAccessConfig, enabled: bool, policies: tuple[PolicyConfig, ...]) -> Listed:
    from dledger.services.account_changes import account_of
    from dledger.state.accounts import AccountConfig

    config = AccountConfig(
        plain.access_key,
        NOT_SHOWN,
        plain.admin,
        enabled,
        plain.white_remote_address or "",
        plain.default_topic_perm or "DENY",
        plain.default_group_perm or "DENY",
        _pairs(plain.topic_perms),
        _pairs(plain.group_perms),
        policies,
    )
    return Listed(account_of(config), "; ".join(map(_shown_policy, policies)) or None)


def _policies(acl: AclInfo) -> tuple[PolicyConfig, ...]:
    from dledger.state.accounts import PolicyConfig

    return tuple(
        PolicyConfig(
            policy.policy_type or "Custom",
            entry.resource,
            tuple(entry.actions),
            tuple(entry.source_ips),
            entry.decision,
        )
        for policy in acl.policies
        for entry in policy.entries
    )


def _pairs(lines: Sequence[str]) -> dict[str, str]:
    return {name: text for name, _, text in (line.rpartition("=") for line in lines)}


def _shown_policy(entry: PolicyConfig) -> str:
    sources = f" from {','.join(entry.source_ips)}" if entry.source_ips else ""
    return f"{entry.decision} {','.join(entry.actions)} {entry.resource}{sources}"


@contextmanager
def _shown_once(drawn: str | None) -> Iterator[None]:
    """Print a drawn secret behind the change, also one that fails: a group may have it then."""
    try:
        yield
    except BaseException:
        if drawn is not None:
            note("some broker groups may have the secret that is printed; see dledger acl ls")
        raise
    finally:
        if drawn is not None:
            sys.stdout.write(f"{drawn}\n")
