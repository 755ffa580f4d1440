"""What the contract checkers share: requirements that fail with one sentence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def require(condition: object, sentence: str) -> None:
    """Demand *condition*.

    Raises:
        AssertionError: It does not hold; the text is *sentence*.
    """
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(sentence)


@contextmanager
def require_error(expected: type[BaseException], act: str) -> Iterator[None]:
    """Demand that the block raises *expected*.

    Args:
        act: What the block does, as the subject of the sentence.
    Raises:
        AssertionError: It raises nothing, or something else, which is the cause then.
    """
    __tracebackhide__ = True
    try:
        yield
    except expected:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{act} raises {found}, not {expected.__name__}") from error
    raise AssertionError(f"{act} raises nothing, not {expected.__name__}")


def unwrapped(check: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Let *check* raise the first broken requirement itself, not the group its tasks made of it."""

    @wraps(check)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True
        try:
            await check(*args, **kwargs)
        except BaseExceptionGroup as group:
            broken = group.subgroup(AssertionError)
            while isinstance(broken, BaseExceptionGroup):
                broken = broken.exceptions[0]  # type: ignore[assignment]  # down to a leaf
            if broken is None:
                raise
            raise broken from group

    return run
