"""The clients and faults there are, read from `clients.toml` and `faults.toml`."""

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from tests.harness.shipped_files import ROOT

HERE = Path(__file__).parent


class Client(msgspec.Struct, frozen=True):
    """A client; the fields are those of `clients.toml`."""

    title: str
    needs: tuple[str, ...]
    port: Literal["namesrv", "proxy"]
    command: tuple[str, ...]

    @property
    def missing(self) -> str:
        """What this machine lacks for it; empty: nothing."""
        there = (
            (ROOT / need).exists() if "/" in need else shutil.which(need) for need in self.needs
        )
        return ", ".join(need for need, found in zip(self.needs, there, strict=True) if not found)

    def started_in(self, folder: Path) -> tuple[str, ...]:
        """Return the command of its load program."""
        names = {"folder": folder, "root": ROOT, "python": sys.executable}
        return tuple(word.format_map(names) for word in self.command)


class Fault(msgspec.Struct, frozen=True):
    """A fault; the fields are those of `faults.toml`."""

    title: str
    members: Literal["leader", "all"] = "leader"
    signal: Literal["", "SIGKILL", "SIGTERM", "SIGSTOP"] = ""
    then: Literal["", "start", "SIGCONT"] = ""
    after_s: float = 0.0
    others: tuple[str, ...] = ()
    for_s: float = 0.0


def _tables(name: str) -> object:
    return tomllib.loads((HERE / name).read_text())


CLIENTS = msgspec.convert(_tables("clients.toml"), dict[str, Client])
FAULTS = msgspec.convert(_tables("faults.toml"), dict[str, Fault])
