"""``dledger generate``: files for what runs and watches a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dledger.output import CliError, ExitCode, note

app = App(name="generate", help="Write files for what runs and watches a cluster.", backend="trio")

To = Annotated[
    Path | None,
    Parameter(help="Folder to write to, made if it is not there; standard output otherwise."),
]


@app.command
def grafana(*, to: To = None) -> int:
    """Write a board for Grafana: groups, topics, lag, latencies, Raft, nodes."""
    from dledger.generate.grafana import grafana_files

    return _give(grafana_files(), to)


@app.command
def prometheus(
    *,
    broker: Annotated[
        tuple[str, ...] | None,
        Parameter(help="host:port of a broker's metrics; may be repeated."),
    ] = None,
    name_server: Annotated[
        tuple[str, ...] | None,
        Parameter(name="--namesrv", help="host:port of a NameServer's metrics; may be repeated."),
    ] = None,
    proxy: Annotated[
        tuple[str, ...] | None,
        Parameter(help="host:port of a proxy's metrics; may be repeated."),
    ] = None,
    to: To = None,
) -> int:
    """Write what Prometheus scrapes, and the alert rules."""
    from dledger.generate.prometheus import prometheus_files

    brokers = broker or ("127.0.0.1:5557",)
    return _give(prometheus_files(brokers, name_server or (), proxy or ()), to)


@app.command
def systemd(
    *,
    bin_: Annotated[
        Path | None, Parameter(name="--bin", help="Folder of the programs; that of this one else.")
    ] = None,
    to: To = None,
) -> int:
    """Write units for a NameServer and a broker, their user, and examples of their settings."""
    from dledger.generate.systemd import systemd_files

    return _give(systemd_files(str(bin_ or Path(sys.executable).parent)), to)


@app.command
def compose(
    *,
    image: Annotated[str, Parameter(help="Name and tag of the image.")] = "dledger:0.1.0",
    advertise: Annotated[
        str, Parameter(help="Address of this machine for clients outside the containers.")
    ] = "",
    to: To = None,
) -> int:
    """Write a Containerfile, and a compose file of a cluster with a proxy and a console."""
    from dledger.generate.containers import compose_files

    return _give(compose_files(image, advertise), to)


@app.command
def helm(*, to: To = None) -> int:
    """Write a Helm chart: NameServers and one broker group."""
    from dledger.generate.containers import helm_files

    return _give(helm_files(), to)


def _give(files: Mapping[str, str], to: Path | None) -> int:
    """Write *files* into a folder, or print them, each after its name when there are several.

    Raises:
        CliError: A file is there and has another text; nothing was written.
    """
    if to is None:
        for name, text in files.items():
            sys.stdout.write(f"# ---- {name}\n{text}" if len(files) > 1 else text)
        return ExitCode.OK
    for name, text in files.items():
        if (to / name).exists() and (to / name).read_text() != text:
            raise CliError(
                f"{to / name} is there and differs; nothing was written",
                next_step="give another folder, or remove it",
                exit_code=ExitCode.USAGE,
            )
    for name, text in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text)
        note(str(to / name))
    return ExitCode.OK
