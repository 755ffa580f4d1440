"""``python -m dledger.cli.child PARENT_PID COMMAND…``: ``dledger`` that dies with its parent.

The child asks for that itself: code between fork and exec is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from dledger.cli.main import main

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
