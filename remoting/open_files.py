"""How many descriptors a daemon may have, and how connections and files share them.

A flood of clients must not take the descriptors that segments and queues need: a broker that
cannot open its next segment has to end, one that closes a connection has not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

CONNECTIONS_SHARE: Final = 0.5
"""At most this share of the descriptors are clients; files and members have the rest."""

OWN_DESCRIPTORS: Final = 32
"""Descriptors of the process itself: standard streams, event loop, listeners, links to members and
NameServers, lock and Raft files, and what a checkpoint opens for a moment. A broker of three was
seen to have 27 with its log's files, and 35 while it wrote a checkpoint."""

MIN_LOG_DESCRIPTORS: Final = 16
"""Of segments, entry index and key index: those that are written, and the ones before."""

LOG_SHARE: Final = 0.15
"""At most this share of the descriptors are the log's: a file that is not used gives its own back,
and is opened again for a read of old messages."""

DESCRIPTORS_PER_QUEUE_FILE: Final = 2
"""A mapped file has one of its own and one that the mapping holds."""

MIN_QUEUE_FILES: Final = 4
"""Fewer would have every message open a file."""

QUEUE_FILES_SHARE: Final = 0.25
"""At most this share of the descriptors are consume queue files."""


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Who may have how many descriptors.

    Attributes:
        connections: Connections of clients, over all listeners.
        queue_files: Consume queue files that are kept open.
        file_descriptors: Descriptors of all files, those of queues included; None: no limit.
    """

    connections: int
    queue_files: int
    file_descriptors: int | None


def share_descriptors(
    wanted_connections: int, wanted_queue_files: int, open_files: int | None
) -> DescriptorShares:
    """Return the shares of a process.

    Args:
        wanted_connections: What the settings ask for.
        wanted_queue_files: As many as are of use; 0 for a process that has none.
        open_files: Its limit; None: there is none.
    """
    if open_files is None:
        return DescriptorShares(wanted_connections, wanted_queue_files, None)
    for_files = int(open_files * QUEUE_FILES_SHARE) // DESCRIPTORS_PER_QUEUE_FILE
    queue_files = min(wanted_queue_files, max(MIN_QUEUE_FILES, for_files))
    of_log = max(MIN_LOG_DESCRIPTORS, int(open_files * LOG_SHARE))
    of_files = queue_files * DESCRIPTORS_PER_QUEUE_FILE + of_log
    left = open_files - OWN_DESCRIPTORS - of_files
    connections = min(wanted_connections, int(open_files * CONNECTIONS_SHARE), left)
    return DescriptorShares(max(1, connections), queue_files, of_files)


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
