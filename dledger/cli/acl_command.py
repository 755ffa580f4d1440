"""``dledger acl``: accounts in an account file, or in the log of the broker groups.

Daemons read a file again by themselves. A secret comes from a file, from standard input or is
drawn; it never stands in an argument.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.output import DEFAULT_NAMESRV, CliError, ExitCode, Namesrv, Output, note, show

if TYPE_CHECKING:
    from dledger.remoting.access.accounts import (
        Account,
        AccountTable,
        Permission,
        Right,
        WhiteAddresses,
    )

app = App(name="acl", help="Show and change accounts, of a file or of a cluster.", backend="trio")

SECRET_BYTES: Final = 24
"""Of a secret that is drawn here."""

File = Annotated[
    Path | None,
    Parameter(name=["--file", "-f"], env_var="DLEDGER_ACL_FILE", help="The account file."),
]
Cluster = Annotated[
    bool, Parameter(negative="", help="In the log of every broker group, instead of a file.")
]
SecretFile = Annotated[
    Path | None, Parameter(help="File with the secret key; without it one is drawn.")
]
SecretStdin = Annotated[
    bool, Parameter(negative="", help="Read the secret key from a line of standard input.")
]
Name = Annotated[str, Parameter(help="Access key of the account.")]
Topics = Annotated[
    tuple[str, ...] | None, Parameter(name="--topic", help="TOPIC=PUB, SUB, PUB|SUB or DENY.")
]
Groups = Annotated[tuple[str, ...] | None, Parameter(name="--group", help="GROUP=SUB or DENY.")]

COLUMNS: Final = ("account", "admin", "white", "default_topic", "default_group", "topics", "groups")


@app.command
async def ls(
    *,
    file: File = None,
    cluster: Cluster = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    output: Output = "table",
) -> None:
    """List accounts; secrets are not shown."""
    if cluster:
        from dledger.cli import acl_in_log

        await acl_in_log.ls(namesrv, output)
        return
    file = _file(file)
    table = _read(file)
    rows = [_row(account) for account in table]
    show(output, f"Accounts in {file}", rows, COLUMNS)
    if table.white and output == "table":
        note(f"everybody from {table.white.text} may do everything")


@app.command
async def check(
    name: Annotated[
        str | None, Parameter(help="Access key; without one only the file is checked.")
    ] = None,
    *,
    file: File = None,
    cluster: Cluster = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    host: Annotated[str, Parameter(help="Address of the client, for policies.")] = "",
    topic: Annotated[str | None, Parameter(help="Check --permission for this topic.")] = None,
    group: Annotated[str | None, Parameter(help="Check consuming as this group.")] = None,
    permission: Annotated[
        str, Parameter(name=["--permission", "-p"], help="PUB or SUB, for --topic.")
    ] = "SUB",
) -> int:
    """Check the file, and what an account may do; exit 1 if it may not."""
    from dledger.remoting.access.accounts import group_right, topic_right

    if name is None:
        if cluster:
            raise CliError("name an account to check", exit_code=ExitCode.USAGE)
        file = _file(file)
        note(f"{file}: {len(_read(file))} accounts")
        return ExitCode.OK
    asked: list[Right] = []
    if topic is not None:
        asked.append(topic_right(topic, _permission(permission)))
    if group is not None:
        asked.append(group_right(group))
    if not asked:
        raise CliError("nothing to check: give --topic or --group", exit_code=ExitCode.USAGE)
    if cluster:
        from dledger.cli import acl_in_log

        return await acl_in_log.check(namesrv, name, asked, host)
    account = _account(_read(_file(file)), name)
    refused = [right for right in asked if not account.allows(right, host)]
    for right in asked:
        kind = "group" if right.is_group else "topic"
        verdict = "may not" if right in refused else "may"
        note(f"{name} {verdict} {right.permission} {kind} {right.name}")
    return ExitCode.FAILED if refused else ExitCode.OK


@app.command
async def add(
    name: Name,
    *,
    file: File = None,
    cluster: Cluster = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    secret_file: SecretFile = None,
    secret_stdin: SecretStdin = False,
    admin: Annotated[bool, Parameter(help="May change topics, groups and settings.")] = False,
    topic: Topics = None,
    group: Groups = None,
    default_topic: Annotated[str, Parameter(help="Permission for topics without a line.")] = "DENY",
    default_group: Annotated[str, Parameter(help="Permission for groups without a line.")] = "DENY",
    white: Annotated[
        str, Parameter(help="Addresses from which the name suffices, without a signature.")
    ] = "",
) -> None:
    """Add an account. Creates a missing file; prints a drawn secret once."""
    from dledger.remoting.access.accounts import KEY_LENGTH_MIN, Account, AccountTable

    if cluster:
        from dledger.cli import acl_in_log

        await acl_in_log.add(
            namesrv,
            name,
            _secret(secret_file, secret_stdin),
            admin=admin,
            topics=_texts(topic),
            groups=_texts(group),
            default_topic=str(_permission(default_topic)),
            default_group=str(_permission(default_group)),
            white=_white(white).text,
        )
        return
    file = _file(file)
    table = _read(file) if file.exists() else AccountTable()
    if table.get(name) is not None:
        raise CliError(f"{file}: account {name} exists already", next_step="dledger acl grant")
    given = _secret(secret_file, secret_stdin)
    secret = secrets.token_urlsafe(SECRET_BYTES) if given is None else given
    if not name or len(secret) < KEY_LENGTH_MIN:
        raise CliError(
            f"an account has a name, and a secret key of at least {KEY_LENGTH_MIN} characters",
            exit_code=ExitCode.USAGE,
        )
    account = Account(
        name,
        secret,
        is_admin=admin,
        white=_white(white),
        default_topic=_permission(default_topic),
        default_group=_permission(default_group),
        topics=_lines(topic),
        groups=_lines(group),
    )
    _write(file, table, {name: account})
    if given is None:
        sys.stdout.write(f"{secret}\n")


@app.command
async def grant(
    name: Name,
    *,
    file: File = None,
    cluster: Cluster = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    topic: Topics = None,
    group: Groups = None,
) -> None:
    """Set what an account may do with topics and groups."""
    topics, groups = _lines(topic), _lines(group)
    if not topics and not groups:
        raise CliError("nothing to grant: give --topic or --group", exit_code=ExitCode.USAGE)
    if cluster:
        from dledger.cli import acl_in_log

        await acl_in_log.change_lines(namesrv, name, topics=_texts(topic), groups=_texts(group))
        return
    file = _file(file)
    table = _read(file)
    account = _account(table, name)
    changed = replace(
        account, topics={**account.topics, **topics}, groups={**account.groups, **groups}
    )
    _write(file, table, {name: changed})


@app.command
async def revoke(
    name: Name,
    *,
    file: File = None,
    cluster: Cluster = False,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    topic: Annotated[
        tuple[str, ...] | None, Parameter(help="Remove the line about it; may be repeated.")
    ] = None,
    group: Annotated[
        tuple[str, ...] | None, Parameter(help="Remove the line about it; may be repeated.")
    ] = None,
) -> None:
    """Remove lines about topics and groups: the account's defaults apply."""
    if cluster:
        from dledger.cli import acl_in_log

        await acl_in_log.change_lines(
            namesrv, name, topics=dict.fromkeys(topic or ()), groups=dict.fromkeys(group or ())
        )
        return
    file = _file(file)
    table = _read(file)
    account = _account(table, name)
    topics, groups = _without(account.topics, topic), _without(account.groups, group)
    _write(file, table, {name: replace(account, topics=topics, groups=groups)})


@app.command
async def rm(
    name: Name, *, file: File = None, cluster: Cluster = False, namesrv: Namesrv = DEFAULT_NAMESRV
) -> None:
    """Remove an account."""
    if cluster:
        from dledger.cli import acl_in_log

        await acl_in_log.rm(namesrv, name)
        return
    file = _file(file)
    table = _read(file)
    _account(table, name)
    _write(file, table, {name: None})


@app.command
async def disable(name: Name, *, namesrv: Namesrv = DEFAULT_NAMESRV) -> None:
    """Refuse every request in the name of an account of the log."""
    from dledger.cli import acl_in_log

    await acl_in_log.set_enabled(namesrv, name, False)


@app.command
async def enable(name: Name, *, namesrv: Namesrv = DEFAULT_NAMESRV) -> None:
    """Take requests in the name of an account of the log again."""
    from dledger.cli import acl_in_log

    await acl_in_log.set_enabled(namesrv, name, True)


@app.command
async def secret(
    name: Name,
    *,
    namesrv: Namesrv = DEFAULT_NAMESRV,
    secret_file: SecretFile = None,
    secret_stdin: SecretStdin = False,
) -> None:
    """Give an account of the log another secret; prints a drawn one once."""
    from dledger.cli import acl_in_log

    await acl_in_log.new_secret(namesrv, name, _secret(secret_file, secret_stdin))


@app.command
def convert(
    source: Annotated[Path, Parameter(help="RocketMQ's plain_acl.yml.")],
    target: Annotated[Path, Parameter(help="Account file to write.")],
) -> None:
    """Convert RocketMQ's plain_acl.yml to an account file."""
    table = _read(source)
    if target.exists():
        raise CliError(f"{target} exists already", exit_code=ExitCode.USAGE)
    _write(target, table, {})


def _row(account: Account) -> dict[str, Any]:
    may_all = account.is_admin and not (account.topics or account.groups)
    default_topic = "everything" if may_all else str(account.default_topic)
    default_group = "everything" if may_all else str(account.default_group)
    return {
        "account": account.access_key,
        "admin": account.is_admin,
        "white": account.white.text or None,
        "default_topic": default_topic,
        "default_group": default_group,
        "topics": _shown(account.topics),
        "groups": _shown(account.groups),
    }


def _shown(lines: Mapping[str, Permission]) -> str | None:
    return ", ".join(f"{name}={permission}" for name, permission in lines.items()) or None


def _file(path: Path | None) -> Path:
    if path is None:
        raise CliError(
            "which accounts? give --file, DLEDGER_ACL_FILE in the environment, or --cluster",
            exit_code=ExitCode.USAGE,
        )
    return path


def _read(path: Path) -> AccountTable:
    from dledger.remoting.access.account_file import parse_accounts

    try:
        return parse_accounts(str(path), path.read_bytes())
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", exit_code=ExitCode.USAGE) from None


def _account(table: AccountTable, name: str) -> Account:
    account = table.get(name)
    if account is None:
        raise CliError(f"account {name} does not exist", next_step="see dledger acl ls")
    return account


def _permission(text: str) -> Permission:
    from dledger.remoting.access.accounts import parse_permission

    try:
        return parse_permission(text)
    except ValueError as error:
        raise CliError(str(error), exit_code=ExitCode.USAGE) from None


def _white(text: str) -> WhiteAddresses:
    from dledger.remoting.access.accounts import WhiteAddresses

    try:
        return WhiteAddresses(text)
    except ValueError as error:
        raise CliError(f"--white: {error}", exit_code=ExitCode.USAGE) from None


def _lines(assignments: Sequence[str] | None) -> dict[str, Permission]:
    found: dict[str, Permission] = {}
    for assignment in assignments or ():
        name, equals, permission = assignment.rpartition("=")
        if not equals or not name:
            raise CliError(f"{assignment!r} is not NAME=PERMISSION", exit_code=ExitCode.USAGE)
        found[name] = _permission(permission)
    return found


def _texts(assignments: Sequence[str] | None) -> dict[str, str]:
    return {name: str(permission) for name, permission in _lines(assignments).items()}


def _without(lines: Mapping[str, Permission], names: Sequence[str] | None) -> dict[str, Permission]:
    for name in names or ():
        if name not in lines:
            raise CliError(f"the account has no line about {name}")
    return {name: permission for name, permission in lines.items() if name not in (names or ())}


def _secret(path: Path | None, is_on_stdin: bool) -> str | None:
    """Return the secret that is given; None: one is to be drawn."""
    if path is None and not is_on_stdin:
        return None
    try:
        text = sys.stdin.readline() if path is None else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{path}: cannot be read: {error}", exit_code=ExitCode.USAGE) from None
    if not text.strip():
        raise CliError("the secret is empty", exit_code=ExitCode.USAGE)
    return text.strip()


def _write(path: Path, table: AccountTable, changes: Mapping[str, Account | None]) -> None:
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
