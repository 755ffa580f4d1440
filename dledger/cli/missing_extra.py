"""One sentence when a command needs a distribution that only an extra installs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Final

from dledger.cli.output import CliError, ExitCode

DISTRIBUTION: Final = "dledger-mq"
_OPTIONAL: Final = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([^'"]+)['"]""")


def extras_of(requirements: list[str]) -> dict[str, str]:
    """Return top-level module → extra, of requirements as a wheel's metadata has them.

    The first extra wins: they stand there in the order of `pyproject.toml`, the smallest first.
    """
    found: dict[str, str] = {}
    for line in requirements:
        if match := _OPTIONAL.match(line):
            found.setdefault(match[1].lower().replace("-", "_"), match[2])
    return found


def missing_extra(error: ImportError) -> CliError | None:
    """Return the error to show in place of *error*, or None when no extra brings the module."""
    cause: BaseException | None = error
    # The library that loads a command puts an error of its own around that of the import.
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    module = (cause.name or "").partition(".")[0] if cause is not None else ""
    try:
        extra = extras_of(requires(DISTRIBUTION) or []).get(module.lower())
    except PackageNotFoundError:
        return None
    if extra is None:
        return None
    return CliError(
        f"this command needs {module}, which is not installed",
        next_step=f"pip install '{DISTRIBUTION}[{extra}]'",
        exit_code=ExitCode.USAGE,
    )
