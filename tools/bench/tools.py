"""What the rivals need, fetched with the clients of their own ecosystems and compiled here.

Go modules and Maven packages come from the registries that this machine is set to. They stay in one
folder, so a second run fetches nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dledger.output import CliError
from tools.bench.processes import run_program

NATS_SERVER: Final = "github.com/nats-io/nats-server/v2@v2.15.2"
NATS_VERSION: Final = "2.15.2"
ROCKETMQ_VERSION: Final = "5.5.0"
"""As in ``load/pom.xml``."""

SOURCES: Final = Path(__file__).parent / "load"
FETCH_TIMEOUT_S: Final = 900.0
"""A first build of nats-server takes two minutes on a busy machine of two cores."""


@dataclass(slots=True)
class Tools:
    """Where the programs of the rivals are, and why some are missing.

    Attributes:
        missing: Name of a tool chain (``go``, ``java``) to the reason.
    """

    folder: Path
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def nats_server(self) -> Path:
        """The server of NATS."""
        return self.folder / f"nats-{NATS_VERSION}" / "nats-server"

    @property
    def nats_load(self) -> Path:
        """The load program of NATS."""
        return self.folder / "nats-load"

    @property
    def jars(self) -> Path:
        """A folder with RocketMQ's broker, NameServer and client and all they need."""
        return self.folder / f"rocketmq-{ROCKETMQ_VERSION}"

    @property
    def java_classes(self) -> Path:
        """A folder with the compiled load program of the Java client."""
        return self.folder / "classes"


def absent(needed: dict[str, tuple[str, ...]], which: Callable[[str], str | None]) -> str:
    """Return one sentence about the tool chains that are missing; empty when none is.

    Args:
        needed: Name of a tool chain to its programs.
    """
    missing = [
        f"{name} ({', '.join(lacking)})"
        for name, programs in needed.items()
        if (lacking := [program for program in programs if which(program) is None])
    ]
    return f"{' and '.join(missing)} must be on the PATH: not found." if missing else ""


NEEDED: Final = {"go": ("go",), "java": ("java", "javac", "mvn")}
NAMES: Final = {"go": "Go 1.26", "java": "Java 17 with Maven"}


async def fetch(folder: Path, wanted: set[str], progress: Callable[[str], None]) -> Tools:
    """Fetch and compile; what cannot be had stands in `Tools.missing`, with the reason.

    Args:
        folder: Kept from run to run.
        wanted: Of `NEEDED`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tools = Tools(folder)
    for chain, make in (("go", _go), ("java", _java)):
        if chain not in wanted:
            continue
        reason = absent({NAMES[chain]: NEEDED[chain]}, shutil.which)
        try:
            if not reason:
                await make(tools, progress)
        except CliError as error:
            reason = str(error)
        if reason:
            tools.missing[chain] = reason
            progress(reason)
    return tools


async def _go(tools: Tools, progress: Callable[[str], None]) -> None:
    log = tools.folder / "go.log"
    if not tools.nats_server.exists():
        progress(f"building nats-server {NATS_VERSION}, about two minutes")
        tools.nats_server.parent.mkdir(exist_ok=True)
        await run_program(
            "go install",
            ["go", "install", NATS_SERVER],
            log,
            FETCH_TIMEOUT_S,
            GOBIN=str(tools.nats_server.parent),
            GOFLAGS=_go_flags(),
        )
    build = ["go", "build", "-C", str(SOURCES), "-o", str(tools.nats_load), "."]
    await run_program("go build", build, log, FETCH_TIMEOUT_S, GOFLAGS=_go_flags())


def _go_flags() -> str:
    """Return the caller's flags of Go, without stamps of a version control."""
    return f"{os.environ.get('GOFLAGS', '')} -buildvcs=false".strip()


async def _java(tools: Tools, progress: Callable[[str], None]) -> None:
    log = tools.folder / "java.log"
    complete = tools.jars / "complete"
    if not complete.exists():
        progress(f"fetching RocketMQ {ROCKETMQ_VERSION} and its Java client, about one minute")
        await run_program(
            "mvn",
            [
                *("mvn", "-q", "-B", "-f", str(SOURCES / "pom.xml")),
                *("dependency:copy-dependencies", "-DincludeScope=runtime"),
                f"-DoutputDirectory={tools.jars}",
            ],
            log,
            FETCH_TIMEOUT_S,
        )
        complete.touch()
    tools.java_classes.mkdir(exist_ok=True)
    await run_program(
        "javac",
        [
            *("javac", "-nowarn", "-cp", f"{tools.jars}/*", "-d", str(tools.java_classes)),
            str(SOURCES / "Load.java"),
        ],
        log,
        FETCH_TIMEOUT_S,
    )
