"""The secret that the members of a broker group share, in a file that only its owner reads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from dledger.output import CliError, ExitCode

SECRET_RANDOM_BYTES: Final = 32
"""As many as the hash that proves it has: it cannot be guessed from a proof."""

OWNER_ONLY: Final = 0o600


def make_secret(path: Path) -> None:
    """Write a new secret to *path*, which only the owner can read.

    Raises CliError: there is a file already, which is left as it is; or it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except FileExistsError:
        raise CliError(
            f"{path} exists already and was not changed: members that have it would no longer"
            " know the others",
            next_step="give another name, or use that file",
            exit_code=ExitCode.USAGE,
        ) from None
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror}") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secrets.token_urlsafe(SECRET_RANDOM_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
