"""Whether the disk has space for what clients send; measured every second, on every role.

Above the warning level a leader refuses sends and takes what the group itself has to write, such
as the record that lets old segments go. Below it again it takes sends, by itself.

Spec: docs/internals/protocol/store.md, section 12.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from commitlog.errors import DiskFullError

log = structlog.get_logger(__name__)


class DiskSpace:
    """How full the disk is.

    Args:
        disk_ratio: Used part of the disk now, 0 to 1.
        warning_ratio: From here on sends are refused.
    """

    __slots__ = ("_disk_ratio", "is_full", "ratio", "warning_ratio")

    def __init__(self, disk_ratio: Callable[[], float], warning_ratio: float) -> None:
        self._disk_ratio = disk_ratio
        self.warning_ratio = warning_ratio
        self.ratio = 0.0
        self.is_full = False
        """Whether sends are to be refused."""

    def measure(self) -> None:
        """Measure the disk; to be called once a second."""
        self.ratio = self._disk_ratio()
        is_full = self.ratio >= self.warning_ratio
        if is_full != self.is_full:
            self.is_full = is_full
            if is_full:
                log.error("disk_full", used_ratio=round(self.ratio, 4))
            else:
                log.info("disk_has_space", used_ratio=round(self.ratio, 4))

    def full_error(self) -> DiskFullError:
        """Return the error for a send that is refused: nothing was stored, later it may be."""
        return DiskFullError(
            f"the disk is {self.ratio:.0%} full, sends are refused from {self.warning_ratio:.0%} "
            "on (diskSpaceWarningLevelRatio); nothing was stored"
        )
