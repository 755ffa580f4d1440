"""``dledger acl``: accounts in an account file, or in the log of the broker groups.

Daemons read a file again by themselves. A secret comes from a file, from standard input or is
drawn; it never stands in an argument.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar

from cyclopts import App, Parameter

from dledger.cli.acl_accounts import (
    FileAccounts,
    LogAccounts,
    may_all,
    read_accounts,
    write_accounts,
)
from dledger.cli.commands import NAMESRV, open_admin, with_admin, with_options
from dledger.output import DEFAULT_NAMESRV, CliError, ExitCode, Output

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin
    from dledger.remoting.access.accounts import (
        Permission,
        Right,
        WhiteAddresses,
    )

P = ParamSpec("P")
T = TypeVar("T")

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


def of_accounts(
    function: Callable[Concatenate[FileAccounts | LogAccounts, P], Awaitable[T]],
) -> Callable[..., Awaitable[T]]:
    """Make a command of a function of accounts: adds where these are."""

    async def command(
        *args: Any,
        file: Path | None = None,
        cluster: bool = False,
        namesrv: str = DEFAULT_NAMESRV,
        **options: Any,
    ) -> T:
        async with _accounts(file, cluster, namesrv) as accounts:
            return await function(accounts, *args, **options)

    return with_options(
        command, function, ("file", File, None), ("cluster", Cluster, False), NAMESRV
    )


@asynccontextmanager
async def _accounts(
    file: Path | None, cluster: bool, namesrv: str
) -> AsyncIterator[FileAccounts | LogAccounts]:
    if cluster:
        async with open_admin(namesrv) as admin:
            yield LogAccounts(admin)
    elif file is not None:
        yield FileAccounts(file)
    else:
        raise CliError(
            "which accounts? give --file, DLEDGER_ACL_FILE in the environment, or --cluster",
            exit_code=ExitCode.USAGE,
        )


@app.command
@of_accounts
async def ls(accounts: FileAccounts | LogAccounts, *, output: Output = "table") -> None:
    """List accounts; secrets are not shown."""
    await accounts.show(output)


@app.command
@of_accounts
async def check(
    accounts: FileAccounts | LogAccounts,
    name: Annotated[
        str | None, Parameter(help="Access key; without one only the file is checked.")
    ] = None,
    *,
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
        accounts.check_all()
        return ExitCode.OK
    asked: list[Right] = []
    if topic is not None:
        asked.append(topic_right(topic, _permission(permission)))
    if group is not None:
        asked.append(group_right(group))
    if not asked:
        raise CliError("nothing to check: give --topic or --group", exit_code=ExitCode.USAGE)
    may = True
    for broker, account in (await accounts.named(name)).items():
        may = may_all(account, asked, host, broker) and may
    return ExitCode.OK if may else ExitCode.FAILED


@app.command
@of_accounts
async def add(
    accounts: FileAccounts | LogAccounts,
    name: Name,
    *,
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
    from dledger.remoting.access.accounts import Account

    given = _secret(secret_file, secret_stdin)
    account = Account(
        name,
        secrets.token_urlsafe(SECRET_BYTES) if given is None else given,
        is_admin=admin,
        white=_white(white),
        default_topic=_permission(default_topic),
        default_group=_permission(default_group),
        topics=_lines(topic),
        groups=_lines(group),
    )
    await accounts.add(account, is_drawn=given is None)


@app.command
@of_accounts
async def grant(
    accounts: FileAccounts | LogAccounts, name: Name, *, topic: Topics = None, group: Groups = None
) -> None:
    """Set what an account may do with topics and groups."""
    topics, groups = _lines(topic), _lines(group)
    if not topics and not groups:
        raise CliError("nothing to grant: give --topic or --group", exit_code=ExitCode.USAGE)
    await accounts.change(name, topics, groups)


@app.command
@of_accounts
async def revoke(
    accounts: FileAccounts | LogAccounts,
    name: Name,
    *,
    topic: Annotated[
        tuple[str, ...] | None, Parameter(help="Remove the line about it; may be repeated.")
    ] = None,
    group: Annotated[
        tuple[str, ...] | None, Parameter(help="Remove the line about it; may be repeated.")
    ] = None,
) -> None:
    """Remove lines about topics and groups: the account's defaults apply."""
    await accounts.change(name, dict.fromkeys(topic or ()), dict.fromkeys(group or ()))


@app.command
@of_accounts
async def rm(accounts: FileAccounts | LogAccounts, name: Name) -> None:
    """Remove an account."""
    await accounts.remove(name)


@app.command
@with_admin
async def disable(admin: Admin, name: Name) -> None:
    """Refuse every request in the name of an account of the log."""
    await admin.update_user(name, is_enabled=False)


@app.command
@with_admin
async def enable(admin: Admin, name: Name) -> None:
    """Take requests in the name of an account of the log again."""
    await admin.update_user(name, is_enabled=True)


@app.command
@with_admin
async def secret(
    admin: Admin, name: Name, *, secret_file: SecretFile = None, secret_stdin: SecretStdin = False
) -> None:
    """Give an account of the log another secret; prints a drawn one once."""
    given = _secret(secret_file, secret_stdin)
    drawn = secrets.token_urlsafe(SECRET_BYTES) if given is None else given
    await LogAccounts(admin).set_secret(name, drawn, is_drawn=given is None)


@app.command
def convert(
    source: Annotated[Path, Parameter(help="RocketMQ's plain_acl.yml.")],
    target: Annotated[Path, Parameter(help="Account file to write.")],
) -> None:
    """Convert RocketMQ's plain_acl.yml to an account file."""
    table = read_accounts(source)
    if target.exists():
        raise CliError(f"{target} exists already", exit_code=ExitCode.USAGE)
    write_accounts(target, table, {})


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
