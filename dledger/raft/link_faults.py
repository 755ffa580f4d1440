"""Whether a connection failed because of this machine, or because the other side is gone.

That a peer is gone is seen all the time and says nothing. That this machine has no descriptor, no
buffer or an input/output error is for an operator to know.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

LOCAL: Final = frozenset(
    {
        errno.EACCES,  # a firewall of this machine
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,  # no port left to call from, or no such address here
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPERM,
    }
)
"""Numbers of errors that this machine is the cause of."""


def local_fault(error: BaseException) -> str | None:
    """Return what failed on this machine; None: the other side, or the way to it, is gone."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno in LOCAL:
            return str(one)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the errors it is a group of, and what caused each of them."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _causes(part)
        error = error.__cause__
