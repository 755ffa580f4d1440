"""Plants one bug into this interpreter. The only door the hunt knows: a number."""

from __future__ import annotations

from typing import Any

from dledger.group import Group
from dledger.raft.guards import Guards
from jepsen_like.mutants.registry import MUTANTS, Mutant, by_number
from jepsen_like.mutants.rewrite import StaleMutantError, check, rewrite


def apply(number: int) -> None:
    """Change the product as the planted bug *number* says, for the life of this interpreter.

    Raises:
        KeyError: There is no such bug.
        StaleMutantError: The product's text has moved on.
    """
    mutant = by_number(number)
    for edit in mutant.edits:
        rewrite(edit.target, edit.old, edit.new)
    if mutant.guards_off:
        constructor: Any = Group.__init__
        constructor.__kwdefaults__["guards"] = Guards(**dict.fromkeys(mutant.guards_off, False))


def stale() -> dict[int, str]:
    """Return the planted bugs that no longer fit the product, and why. Changes nothing."""
    found: dict[int, str] = {}
    for mutant in MUTANTS:
        try:
            _check(mutant)
        except StaleMutantError as error:
            found[mutant.number] = str(error)
    return found


def _check(mutant: Mutant) -> None:
    for edit in mutant.edits:
        check(edit.target, edit.old)
    Guards(**dict.fromkeys(mutant.guards_off, False))
