"""``dledger acl --cluster``: accounts in the log of every broker group."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from dledger.cli.commands import open_admin
from dledger.output import CliError, ExitCode, Output, note, show
from dledger.services.account_changes import account_of
from dledger.state.accounts import AccountConfig, PolicyConfig

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.access.accounts import Right
    from dledger.remoting.protocol.access_bodies import AclInfo, PlainAccessConfig

COLUMNS: Final = (
    "broker",
    "account",
    "admin",
    "enabled",
    "white",
    "default_topic",
    "default_group",
    "topics",
    "groups",
    "policies",
)

SECRET_BYTES: Final = 24
"""Of a secret that is drawn here."""

NOT_SHOWN: Final = "not shown"
"""Stands for a secret: no answer has one."""

Lines = Mapping[str, str]


async def _accounts(admin: Admin) -> dict[str, dict[str, AccountConfig]]:
    """Return the accounts of each broker group by their names; secrets are not among them."""
    configs, users = await admin.accounts(), await admin.users()
    policies = await admin.policies()
    found: dict[str, dict[str, AccountConfig]] = {}
    for broker, config in configs.items():
        enabled = {user.username: user.user_status != "disable" for user in users.get(broker, [])}
        entries = {acl.subject: _policies(acl) for acl in policies.get(broker, [])}
        found[broker] = {
            plain.access_key: _account(
                plain,
                enabled.get(plain.access_key, True),
                entries.get(f"User:{plain.access_key}", ()),
            )
            for plain in config.plain_access_configs
        }
    return found


def _account(
    plain: PlainAccessConfig, enabled: bool, policies: tuple[PolicyConfig, ...]
) -> AccountConfig:
    return AccountConfig(
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


def _policies(acl: AclInfo) -> tuple[PolicyConfig, ...]:
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


async def ls(namesrv: str, output: Output) -> None:
    """List the accounts of every broker group."""
    async with open_admin(namesrv) as admin:
        accounts = await _accounts(admin)
        white = {
            name: config.global_white_addrs for name, config in (await admin.accounts()).items()
        }
    rows = [_row(broker, account) for broker, rows in accounts.items() for account in rows.values()]
    show(output, "Accounts in the log", rows, COLUMNS)
    if output == "table":
        for broker, patterns in white.items():
            if patterns:
                note(f"{broker}: no signature is needed from {', '.join(patterns)}")
        note("accounts of the files that server.acl_file names are not among them, and count first")


def _row(broker: str, account: AccountConfig) -> dict[str, Any]:
    may_all = account.admin and not (account.topics or account.groups)
    return {
        "broker": broker,
        "account": account.access_key,
        "admin": account.admin,
        "enabled": account.enabled,
        "white": account.white_address or None,
        "default_topic": "everything" if may_all else account.default_topic_perm,
        "default_group": "everything" if may_all else account.default_group_perm,
        "topics": _shown(account.topics),
        "groups": _shown(account.groups),
        "policies": "; ".join(map(_shown_policy, account.policies)) or None,
    }


def _shown(lines: Lines) -> str | None:
    return ", ".join(f"{name}={text}" for name, text in lines.items()) or None


def _shown_policy(entry: PolicyConfig) -> str:
    sources = f" from {','.join(entry.source_ips)}" if entry.source_ips else ""
    return f"{entry.decision} {','.join(entry.actions)} {entry.resource}{sources}"


async def check(namesrv: str, name: str, asked: Sequence[Right], host: str) -> int:
    """Show what an account may do in each broker group; FAILED if it may not everywhere."""
    async with open_admin(namesrv) as admin:
        accounts = await _accounts(admin)
    may_all = True
    for broker, rows in accounts.items():
        row = rows.get(name)
        if row is None:
            raise _no_account(name, broker)
        account = account_of(row)
        for right in asked:
            may = row.enabled and account.allows(right, host)
            may_all = may_all and may
            kind = "group" if right.is_group else "topic"
            verdict = "may" if may else "may not"
            note(f"{broker}: {name} {verdict} {right.permission} {kind} {right.name}")
    return ExitCode.OK if may_all else ExitCode.FAILED


async def add(
    namesrv: str,
    name: str,
    secret: str | None,
    *,
    admin: bool,
    topics: Lines,
    groups: Lines,
    default_topic: str,
    default_group: str,
    white: str,
) -> None:
    """Make an account in every broker group; print a drawn secret once."""
    drawn = secrets.token_urlsafe(SECRET_BYTES) if secret is None else secret
    async with open_admin(namesrv) as cluster:
        for broker, config in (await cluster.accounts()).items():
            if any(plain.access_key == name for plain in config.plain_access_configs):
                raise CliError(
                    f"{broker}: account {name} exists already",
                    next_step="dledger acl grant --cluster",
                )
        with _shown_once(drawn if secret is None else None):
            await cluster.put_account(
                name,
                secret_key=drawn,
                admin=admin,
                white_address=white,
                default_topic=default_topic,
                default_group=default_group,
                topics=topics,
                groups=groups,
            )


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


async def change_lines(
    namesrv: str, name: str, *, topics: Mapping[str, str | None], groups: Mapping[str, str | None]
) -> None:
    """Set lines of an account in every broker group; None removes one."""
    async with open_admin(namesrv) as admin:
        wanted: list[tuple[str, bool, Lines, Lines]] = []
        for broker, rows in (await _accounts(admin)).items():
            row = rows.get(name)
            if row is None:
                raise _no_account(name, broker)
            lines = (_changed(broker, row.topics, topics), _changed(broker, row.groups, groups))
            wanted.append((broker, row.admin, *lines))
        # All of them are checked before the first one is changed.
        for broker, is_admin, of_topics, of_groups in wanted:
            await admin.put_account(
                name, admin=is_admin, topics=of_topics, groups=of_groups, broker_names=(broker,)
            )


def _changed(broker: str, lines: Lines, changes: Mapping[str, str | None]) -> dict[str, str]:
    for name, text in changes.items():
        if text is None and name not in lines:
            raise CliError(f"{broker}: the account has no line about {name}; nothing was changed")
    merged = {**lines, **changes}
    return {name: text for name, text in merged.items() if text is not None}


async def rm(namesrv: str, name: str) -> None:
    """Delete an account in every broker group."""
    async with open_admin(namesrv) as admin:
        for broker, rows in (await _accounts(admin)).items():
            if name not in rows:
                raise _no_account(name, broker)
        await admin.delete_account(name)


async def set_enabled(namesrv: str, name: str, is_enabled: bool) -> None:
    """Let requests in the name of an account pass from now on, or none."""
    async with open_admin(namesrv) as admin:
        await admin.update_user(name, is_enabled=is_enabled)


async def new_secret(namesrv: str, name: str, secret: str | None) -> None:
    """Give an account another secret in every broker group; print a drawn one once."""
    drawn = secrets.token_urlsafe(SECRET_BYTES) if secret is None else secret
    async with open_admin(namesrv) as admin:
        for broker, rows in (await _accounts(admin)).items():
            if name not in rows:
                raise _no_account(name, broker)
        with _shown_once(drawn if secret is None else None):
            await admin.update_user(name, password=drawn)


def _no_account(name: str, broker: str) -> CliError:
    return CliError(
        f"{broker}: account {name} does not exist in the log",
        next_step="see dledger acl ls --cluster",
    )
