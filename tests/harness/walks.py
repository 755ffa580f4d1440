"""The walks of docs/internals/architecture.md: the files that something passes, in their order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tests.harness.shipped_files import ROOT

PAGE = ROOT / "docs" / "internals" / "architecture.md"
_FILE = re.compile(r"`([\w./]+\.py)`")


def files_of(title: str) -> list[str]:
    """Return the files of a walk; a name without a folder is in the folder of the one before."""
    text = PAGE.read_text().split(f"**{title}**", 1)[1]
    rows = re.findall(r"^\| [^|]+ \| (.+) \|$", text.split("\n\n", 2)[1], re.MULTILINE)
    found: list[str] = []
    for name in _FILE.findall("\n".join(rows)):
        found.append(name if "/" in name else f"{found[-1].rpartition('/')[0]}/{name}")
    return found


def stated_counts(title: str) -> tuple[int, int]:
    """Return how many files and how many returns the page states for a walk."""
    line = PAGE.read_text().split(f"**{title}**", 1)[1].split("\n", 1)[0]
    files, returns = re.findall(r"(\d+) (?:files|returns?)\b", line)
    return int(files), int(returns)


def counts(files: Sequence[str]) -> tuple[int, int]:
    """Return how many files a walk has, and how often it comes back to one."""
    return len(set(files)), len(files) - len(set(files))


@contextmanager
def stays(entered: list[str]) -> Iterator[None]:
    """Append each file of this repository that code of the block enters, each time it does."""
    top = f"{ROOT}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(top):
            name = name.removeprefix(top)
            if not entered or entered[-1] != name:
                entered.append(name)

    before: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def first_missed(walk: Sequence[str], entered: Sequence[str]) -> str | None:
    """Return the first file of *walk* that was not entered after those before it."""
    at = 0
    for name in walk:
        try:
            at = entered.index(name, at) + 1
        except ValueError:
            return name
    return None
