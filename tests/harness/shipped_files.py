"""The files that ship with the project, laid out for a test: own data folders, ports that are free.

The ports stay as they are in the files in one process of those that run tests, when nothing else
uses them; otherwise each is replaced by a free one, in the copies and in the commands.
"""

import fcntl
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dledger.cli.ports import free_ports, is_free

ROOT = Path(__file__).parents[2]
NAMESRV_PORT = 9876
_TEMPORARY = re.compile(r"(?<![\w/])/tmp/(?=\w)")
_PORT = re.compile(r"(?:(?<=[:=])|(?<== ))(\d{4,5})\b")
_NUMBER = re.compile(r"\b[1-9]\d{3,4}\b")


@dataclass(frozen=True)
class Shipped:
    """A folder that stands for the top of the repository.

    Attributes:
        root: Where ``examples`` lies.
        namesrv_port: Port of the NameServer.
    """

    root: Path
    ports: Mapping[int, int]

    @property
    def namesrv_port(self) -> int:
        return self.ports[NAMESRV_PORT]

    def adapt(self, text: str) -> str:
        """Return *text* with the data folders and ports of this layout."""
        text = _NUMBER.sub(self._adapt_port, text)
        return _TEMPORARY.sub(f"{self.root}/data/", text)

    def _adapt_port(self, number: re.Match[str]) -> str:
        """Return the port that stands for *number*: that one may be a port of the files as well."""
        return str(self.ports.get(int(number[0]), number[0]))


def lay_out_examples(root: Path) -> Shipped:
    """Copy ``examples`` below *root* with data folders of its own."""
    files = sorted(
        path
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and path.suffix != ".pyc"  # a test that imports an example leaves them
    )
    named = {NAMESRV_PORT} | {
        int(port)
        for path in files
        for line in path.read_text().splitlines()
        if not line.lstrip().startswith("#")
        for port in _PORT.findall(line)
    }
    shipped = Shipped(root, _free(sorted(named)))
    for path in files:
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(shipped.adapt(path.read_text()))
    (root / "data").mkdir(exist_ok=True)
    return shipped


def link_repository(root: Path, environment: Path) -> None:
    """Put what commands at the top of the repository need into *root*."""
    (root / ".venv").symlink_to(environment)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)


@functools.cache
def _may_have_default_ports() -> bool:
    """Return True in one of all processes that run now: they ask while nothing listens yet."""
    lock = Path(tempfile.gettempdir(), f"dledger-default-ports-{os.getuid()}")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)  # held until the process ends
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


def _free(ports: list[int]) -> dict[int, int]:
    if _may_have_default_ports() and all(map(is_free, ports)):
        return {port: port for port in ports}
    return dict(zip(ports, free_ports(len(ports)), strict=True))
