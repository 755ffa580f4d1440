"""Is there an order of these operations? Every order that real time allows is tried."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

State = Hashable


class Step(NamedTuple):
    """An operation of a model.

    Attributes:
        call: When it began.
        ret: When it had ended; infinite: never.
        must: It took effect; otherwise it may have, at any time after its call.
        apply: State to state; None: it cannot take effect in this state.
    """

    call: int
    ret: float
    must: bool
    apply: Callable[[State], State | None]


def has_order(steps: Sequence[Step], begin: State) -> bool:
    """Return whether the steps that must take effect can, one after the other."""
    every = frozenset(range(len(steps)))
    tried: set[tuple[frozenset[int], State]] = set()

    def search(left: frozenset[int], state: State) -> bool:
        if not any(steps[at].must for at in left):
            return True
        if (left, state) in tried:
            return False
        tried.add((left, state))
        soonest = min(steps[at].ret for at in left)
        for at in left:
            if steps[at].call <= soonest:
                after = steps[at].apply(state)
                if after is not None and search(left - {at}, after):
                    return True
        return False

    return search(every, begin)
