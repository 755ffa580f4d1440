"""How many files and connections a daemon may have open, and what is left for connections.

A flood of clients must not take the descriptors that segments and queues need: a broker that
cannot open its next segment has to end, one that closes a connection has not.
"""

from __future__ import annotations

import sys

CONNECTIONS_SHARE = 0.5
"""At most this share of the descriptors are clients; files and members have the rest."""


def connections_allowed(wanted: int, open_files: int | None) -> int:
    """Return how many of *wanted* connections a process with *open_files* descriptors may have.

    Args:
        open_files: None: there is no limit.
    """
    if open_files is None:
        return wanted
    return max(1, min(wanted, int(open_files * CONNECTIONS_SHARE)))


def raise_open_files() -> int | None:
    """Raise this process's limit of open files as far as it may; return it, None without one."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        hard = soft  # macOS takes no unlimited one
    return None if hard == resource.RLIM_INFINITY else hard
