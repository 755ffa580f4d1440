"""An environment that holds a wheel and what its metadata asks for, nothing else.

What is declared is linked from the environment of the tests, so no network is needed; what is
imported and not declared is missing there, as it is on the machine of a new user.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_environment(folder: Path, wheel: Path, requirements: list[str], extra: str = "") -> Path:
    """Make an environment with *wheel* and the closure of *requirements*; return its folder."""
    home = folder / "venv"
    venv.create(home, with_pip=False)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"),
            *("--quiet", "--no-deps", "--no-index", str(wheel)),
        ],
        check=True,
    )
    (site,) = (home / "lib").glob("python*/site-packages")
    for found in closure(requirements, {extra} if extra else set()).values():
        for name in _top_names(found):
            target, link = Path(str(found.locate_file(name))), site / name
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return home


def closure(requirements: list[str], extras: set[str]) -> dict[str, Distribution]:
    """Return name → distribution of all that *requirements* need, here and below."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(line), extras) for line in requirements]
    while waiting:
        requirement, chosen = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in chosen or {""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = distribution(name)
        waiting += [
            (Requirement(line), set(requirement.extras)) for line in found[name].requires or ()
        ]
    return found


def _top_names(found: Distribution) -> Iterator[str]:
    tops = {file.parts[0] for file in found.files or ()}
    yield from sorted(tops - {"..", "__pycache__"})
