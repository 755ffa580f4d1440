"""``dledger debug bundle``: collects what explains a fault into one file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from dledger.cli.commands import broker_addresses, with_admin
from dledger.output import (
    CliError,
    ExitCode,
    Output,
    note,
    print_json,
    show,
)

if TYPE_CHECKING:
    from dledger.client.admin.admin import Admin

app = App(name="debug", help="Collect logs and states for a bug report.", backend="trio")

TAIL_BYTES: Final = 1 << 20
"""Of each log file, from its end: an election and what led to it are far less."""
LOG_FILES_MAX: Final = 64
REMOVED: Final = "(removed)"

_SECRET: Final = re.compile(r"(?i)secret|passw|credential|access_?key|private|token")
_SECRET_IN_TEXT: Final = re.compile(
    r"""(?ix) ( [\w.\-]* (?: secret | passw | credential | access_?key | private | token )
        [\w.\-]* ["']? \s* [=:] \s* ) (?: "[^"]*" | '[^']*' | [^\s,;}]+ )"""
)


def is_secret(key: str) -> bool:
    """Tell whether the value of a setting is left out of a bundle."""
    return _SECRET.search(key) is not None


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return *settings* with the values of those removed that may be secret. Pure."""
    return {key: REMOVED if value and is_secret(key) else value for key, value in settings.items()}


def text_without_secrets(text: str) -> str:
    """Return *text*, a log, with the values of what is named like a secret removed. Pure."""
    return _SECRET_IN_TEXT.sub(lambda found: f'{found.group(1)}"{REMOVED}"', text)


def tail_of(data: bytes, size_bytes: int) -> str:
    """Return the last whole lines of *data*, as text. Pure."""
    if len(data) > size_bytes:
        data = data[-size_bytes:].partition(b"\n")[2]
    return data.decode(errors="replace")


@app.command
@with_admin
async def bundle(
    admin: Admin,
    *,
    to: Annotated[Path, Parameter(help="The file; it must not exist.")] = Path(
        "dledger-debug.tar.gz"
    ),
    logs: Annotated[
        tuple[Path, ...], Parameter(help="Log file, or folder with *.log; may be repeated.")
    ] = (),
    output: Output = "table",
) -> None:
    """Write the states of all nodes into one tar.gz, and list its contents.

    Settings that may be secret, and values named like secrets in logs, are left out. Logs are read
    on this machine only. A node that does not answer is named in errors.txt. No message is in it.
    """
    if to.exists():
        raise CliError(f"{to} exists", next_step="give another --to", exit_code=ExitCode.USAGE)
    parts = await _of_cluster(admin)
    parts |= read_logs(logs)
    parts["contents.txt"] = "".join(f"{name}\n" for name in sorted(parts)).encode()
    to.write_bytes(packed(parts))
    # It holds addresses, names of topics and groups: not for every user of the machine.
    os.chmod(to, 0o600)
    rows = [{"name": name, "bytes": len(parts[name])} for name in sorted(parts)]
    if output == "json":
        print_json({"file": str(to), "holds": rows})
    else:
        show(output, str(to), rows, ("name", "bytes"))
        note("look through it before you send it to anybody")


def packed(parts: Mapping[str, bytes]) -> bytes:
    """Return a tar.gz of *parts*, below one folder; equal parts make equal files inside. Pure."""
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in sorted(parts):
            entry = tarfile.TarInfo(f"dledger-debug/{name}")
            entry.size, entry.mode = len(parts[name]), 0o600
            archive.addfile(entry, io.BytesIO(parts[name]))
    return out.getvalue()


def read_logs(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return name → end of each log file, secrets removed.

    Raises CliError: one is not there, or there are too many; a usage error.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise CliError(f"--logs: no {path}", exit_code=ExitCode.USAGE)
        files += sorted(path.rglob("*.log")) if path.is_dir() else [path]
    if len(files) > LOG_FILES_MAX:
        raise CliError(
            f"--logs: {len(files)} files, at most {LOG_FILES_MAX}", exit_code=ExitCode.USAGE
        )
    found: dict[str, bytes] = {}
    for number, file in enumerate(files):
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - TAIL_BYTES - 1))
            text = text_without_secrets(tail_of(log.read(), TAIL_BYTES))
        found[f"logs/{number:02}-{file.name}"] = text.encode()
    return found


async def _of_cluster(admin: Admin) -> dict[str, bytes]:
    """Return name → content of everything nodes say of themselves.

    Raises NoNameServerError: none answers, so the nodes are not known.
    """
    from importlib.metadata import version

    import trio

    from dledger.client.core.errors import ClientError
    from dledger.remoting.properties import format_properties

    errors: list[str] = []
    parts = {"versions.txt": f"dledger {version('dledger-mq')}\n".encode()}

    async def ask(name: str, question: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        try:
            answer = await question()
        except ClientError as error:
            errors.append(f"{name}: {error}")
            return
        is_settings = name.endswith(".properties")
        parts[name.replace(":", "_")] = (
            format_properties(without_secrets(answer)).encode() if is_settings else _json(answer)
        )

    info = await admin.cluster_info()
    parts["cluster.json"] = _json({"asked": admin.name_servers, "cluster": info})
    async with trio.open_nursery() as nursery:
        for address in broker_addresses(info):
            for name, question in (
                ("raft_status.json", admin.raft_status),
                ("settings.properties", admin.broker_settings),
                ("runtime.json", admin.runtime_info),
            ):
                nursery.start_soon(ask, f"brokers/{address}/{name}", partial(question, address))
        for address in admin.name_servers:
            name = f"name-servers/{address}/settings.properties"
            nursery.start_soon(ask, name, partial(admin.name_server_settings, address))
    if errors:
        parts["errors.txt"] = "".join(f"{line}\n" for line in sorted(errors)).encode()
    return parts


def _json(value: object) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1)
