"""``python -m tools.bench.tied PARENT_PID PROGRAM…``: a program that dies with its parent."""

from __future__ import annotations

import os
import sys

from dledger.cli.fork_server import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
