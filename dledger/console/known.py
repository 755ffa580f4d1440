"""Questions whose answers a page shows as far as they come: a page never fails as a whole.

A page asks everything it shows at the same time. What is refused, or does not come in time, costs
its own part and a sentence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import trio

from dledger.client.core.errors import NoNameServerError, NoRouteError, RequestFailedError
from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.codes import ResponseCode

ANSWER_S: Final = 4.0
"""What has not come by then is shown as not known: a person waits no longer for a page."""
ASKED_AT_ONCE: Final = 16
"""Questions of one page that are out together."""

ACCESS_EXCEPTION: Final = "AclException"
"""Stands in the remark of every refusal of an account."""
NEEDS_ADMIN: Final = "Need admin permission"
"""And in that of one that is proved, and may not do what only an admin may."""
UNCHECKED: Final = "Without access control"
"""And in that of a daemon that checks no accounts, and takes the request from its own machine."""

T = TypeVar("T")


@dataclass(slots=True)
class Known(Generic[T]):
    """An answer, or a neutral value and, in *problem*, why there is none."""

    value: T
    problem: str = f"no answer within {ANSWER_S:g} s"


class Asks:
    """Asks questions side by side; the answers are there when the block of `asking` ends."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.problems: list[str] = []
        self._nursery = nursery
        self._limiter = trio.CapacityLimiter(ASKED_AT_ONCE)

    def __call__(self, question: Callable[[], Awaitable[T]], what: str, otherwise: T) -> Known[T]:
        """Ask *question*; *what* names the answer, for the sentence that it is missing."""
        known = Known(otherwise)
        self._nursery.start_soon(self._ask, question, what, known)
        return known

    async def _ask(self, question: Callable[[], Awaitable[T]], what: str, known: Known[T]) -> None:
        async with self._limiter:
            with trio.move_on_after(ANSWER_S):
                try:
                    known.value, known.problem = await question(), ""
                except MQError as error:
                    known.problem = sentence(error)
        if known.problem:
            self.problems.append(f"{what}: {known.problem}")


def is_access_refusal(error: BaseException) -> bool:
    """Return whether a daemon checks accounts, and refuses this one: nothing was done.

    Brokers answer code 1 and name RocketMQ's exception; others answer NO_PERMISSION.
    """
    if not isinstance(error, RequestFailedError):
        return False
    if error.code == ResponseCode.NO_PERMISSION:
        return True
    return ACCESS_EXCEPTION in error.remark and UNCHECKED not in error.remark


def is_admin_refusal(error: BaseException) -> bool:
    """Return whether a daemon knows the account, and refuses it because it is none of an admin."""
    return isinstance(error, RequestFailedError) and NEEDS_ADMIN in error.remark


def sentence(error: BaseException) -> str:
    """Return what an error means, for a person at a page."""
    text = " ".join(str(error).split())
    if isinstance(error, NoNameServerError):
        return f"no NameServer answers ({text})"
    if isinstance(error, NoRouteError):
        return f"no leader serves it now, or there is no such topic ({text})"
    return text or type(error).__name__


@asynccontextmanager
async def asking() -> AsyncIterator[Asks]:
    """Give an `Asks`; all its answers are known when the block is left."""
    async with trio.open_nursery() as nursery:
        asks = Asks(nursery)
        yield asks
    asks.problems.sort()
