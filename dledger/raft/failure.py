"""Why a node must stop: the first error that a node cannot live with, kept."""

from __future__ import annotations

from commitlog.errors import FlushFailedError


class Failure:
    """The error that every later event raises again.

    So whoever takes the first one for an error of its own stops nothing from stopping.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def raise_again(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def of_disk(self, error: OSError) -> FlushFailedError:
        """Keep what the disk said, and return what to raise."""
        # By its type it would pass for the error of a connection, which is just made anew.
        failure = self.error = FlushFailedError(f"the disk failed: {error}")
        return failure
