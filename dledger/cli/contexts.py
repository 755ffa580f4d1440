"""``dledger context``: names for clusters, in a file of the person that runs the commands.

A context holds addresses of NameServers and the paths of files with credentials and authorities,
never a secret itself. What stands on a command line or in the environment comes before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter

from dledger.commitlog.errors import ConfigError
from dledger.output import CliError, Output, addresses, note, show

OWNER_ONLY: Final = 0o600

VARIABLES: Final = {
    "namesrv": "NAMESRV_ADDR",
    "credentials": "DLEDGER_CREDENTIALS",
    "tls_ca_file": "DLEDGER_TLS_CA_FILE",
}
"""Field of a context → the variable that it stands in for."""


class Context(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One cluster.

    Attributes:
        credentials: Path of a file with an account; empty: none.
        tls_ca_file: Path of the authorities of its certificates; empty: no TLS.
    """

    namesrv: str
    credentials: str = ""
    tls_ca_file: str = ""


class Contexts(msgspec.Struct, forbid_unknown_fields=True):
    """All contexts of a person, and the one in use."""

    current: str = ""
    contexts: dict[str, Context] = {}


def contexts_file(environment: Mapping[str, str]) -> Path:
    """Return where contexts are kept: below XDG_CONFIG_HOME, ``~/.config`` without it."""
    base = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
    return Path(base) / "dledger" / "contexts.json"


def read_contexts(file: Path) -> Contexts:
    """Return what the file holds; none where there is no file.

    Raises ConfigError: it cannot be read.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}") from None


def write_contexts(file: Path, contexts: Contexts) -> None:
    """Replace the file as a whole; only its owner can read it.

    Raises ConfigError: it cannot be written; the old one stays.
    """
    text = msgspec.json.format(msgspec.json.encode(contexts), indent=2)
    beside = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with open(descriptor, "wb") as out:
            out.write(text + b"\n")
        beside.replace(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def use_context(environment: MutableMapping[str, str]) -> None:
    """Put the current context into *environment*, where it has nothing of its own.

    A NameServer that is named otherwise is another cluster: nothing of the context is used then.

    Raises ConfigError: the file cannot be read, or names a context that it does not have.
    """
    file = contexts_file(environment)
    if VARIABLES["namesrv"] in environment or not file.exists():
        return
    found = read_contexts(file)
    if not found.current:
        return
    context = found.contexts.get(found.current)
    if context is None:
        raise ConfigError(f"{file}: there is no context {found.current}; dledger context ls")
    for name, variable in VARIABLES.items():
        value = getattr(context, name)
        if value:
            environment.setdefault(variable, value)


app = App(name="context", help="Give clusters names, and choose one.", backend="trio")

Name = Annotated[str, Parameter(help="Name of the context.")]


@app.command
def add(
    name: Name,
    /,
    *,
    namesrv: Annotated[
        str, Parameter(name=["--namesrv", "-n"], help="NameServers, host:port;host:port.")
    ],
    credentials: Annotated[
        Path | None, Parameter(help="File with the account; its path is kept, not its contents.")
    ] = None,
    tls_ca_file: Annotated[
        Path | None, Parameter(help="File with the authorities; commands talk TLS then.")
    ] = None,
) -> None:
    """Add a context or replace it; the first one is used at once."""
    addresses(namesrv)
    file = contexts_file(os.environ)
    found = read_contexts(file)
    found.contexts[name] = Context(
        namesrv,
        str(credentials.resolve()) if credentials else "",
        str(tls_ca_file.resolve()) if tls_ca_file else "",
    )
    found.current = found.current or name
    write_contexts(file, found)
    note(f"{name} is kept in {file}" + ("; it is in use" if found.current == name else ""))


@app.command
def ls(*, output: Output = "table") -> None:
    """List contexts; commands without --namesrv talk to the one in use."""
    found = read_contexts(contexts_file(os.environ))
    rows = [
        {
            "name": name,
            "in_use": name == found.current,
            "namesrv": context.namesrv,
            "credentials": context.credentials or None,
            "tls_ca_file": context.tls_ca_file or None,
        }
        for name, context in sorted(found.contexts.items())
    ]
    show(output, "", rows, ("name", "in_use", "namesrv"))


@app.command
def use(name: Name, /) -> None:
    """Let commands talk to this context from now on."""
    file = contexts_file(os.environ)
    found = read_contexts(file)
    if name not in found.contexts:
        raise CliError(f"there is no context {name}", next_step="see dledger context ls")
    found.current = name
    write_contexts(file, found)
    note(f"{name}: {found.contexts[name].namesrv}")


@app.command
def rm(name: Name, /) -> None:
    """Forget a context."""
    file = contexts_file(os.environ)
    found = read_contexts(file)
    if found.contexts.pop(name, None) is None:
        raise CliError(f"there is no context {name}", next_step="see dledger context ls")
    found.current = "" if found.current == name else found.current
    write_contexts(file, found)
    note(f"{name} is forgotten")
