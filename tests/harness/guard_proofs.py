"""A proof of a guard: the same test passes with the guard on and fails with it off."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.commitlog.errors import MQError
from dledger.raft.settings import ALL_ON, Guards

Proof = Callable[[Guards, Path], None]

FAILURES = (AssertionError, MQError, pytest.fail.Exception)
"""How a proof may fail with the guard off: an assertion, a tripped invariant, a missing error."""


def proves(name: str) -> Callable[[Proof], Callable[[Path, bool], None]]:
    """Run the decorated test twice: it must pass with guard *name* on, and fail with it off."""

    def decorate(proof: Proof) -> Callable[[Path, bool], None]:
        @pytest.mark.guard(name)
        @pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
        def run(tmp_path: Path, on: bool) -> None:
            guards = replace(ALL_ON, **{name: on})
            if on:
                proof(guards, tmp_path)
                return
            with pytest.raises(FAILURES):
                proof(guards, tmp_path)

        run.__name__ = proof.__name__
        run.__doc__ = proof.__doc__
        return run

    return decorate
