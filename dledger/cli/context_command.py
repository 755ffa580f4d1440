"""``dledger context``: names for clusters, so that commands need no addresses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dledger.output import CliError, Output, addresses, note, show

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
    from dledger.cli.contexts import Context, contexts_file, read_contexts, write_contexts

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
    from dledger.cli.contexts import contexts_file, read_contexts

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
    from dledger.cli.contexts import contexts_file, read_contexts, write_contexts

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
    from dledger.cli.contexts import contexts_file, read_contexts, write_contexts

    file = contexts_file(os.environ)
    found = read_contexts(file)
    if found.contexts.pop(name, None) is None:
        raise CliError(f"there is no context {name}", next_step="see dledger context ls")
    found.current = "" if found.current == name else found.current
    write_contexts(file, found)
    note(f"{name} is forgotten")
