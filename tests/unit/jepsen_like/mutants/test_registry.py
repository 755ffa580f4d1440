"""Planted bugs fit the product as it is, and stay out of sight of those who hunt them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jepsen_like.mutants.apply import stale
from jepsen_like.mutants.registry import FAST, MUTANTS, by_number, numbers
from jepsen_like.mutants.rewrite import StaleMutantError, check


def test_every_edit_finds_its_text_exactly_once() -> None:
    assert stale() == {}


def test_there_are_enough_and_each_has_its_own_number_and_name() -> None:
    assert len(MUTANTS) >= 40
    assert len(set(numbers())) == len(MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(FAST) >= 10
    assert set(FAST) <= set(numbers())
    assert all(mutant.edits or mutant.guards_off for mutant in MUTANTS)


def test_a_text_that_is_gone_is_an_error_not_a_bug_that_is_never_planted() -> None:
    with pytest.raises(StaleMutantError, match="0 times"):
        check("dledger.raft.candidate:majority", "voters // 3")
    with pytest.raises(StaleMutantError, match="not there any more"):
        check("dledger.raft.candidate:minority", "x")


PROGRAMS = {
    92: (
        "from dledger.services.schedule import delivery_batch\n"
        "print(len(delivery_batch([], 1, 19, 20).sizes))"
    ),
    24: (
        "import cbor2\n"
        "from dledger.raft.journal import TermVote\n"
        "vote = TermVote.__new__(TermVote)\n"
        "vote.term, vote.voted_for, vote.version = 9, 'n1', 1\n"
        "print(cbor2.loads(vote.snapshot()[1])[1])"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", PROGRAMS)
def test_a_planted_bug_changes_what_importers_by_name_see(number: int) -> None:
    said = {
        planted: subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                "import dledger.broker\n"
                "from jepsen_like.mutants.apply import apply\n"
                + (f"apply({number})\n" if planted else "")
                + PROGRAMS[number],
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for planted in (False, True)
    }
    assert said == {92: {False: "1", True: "0"}, 24: {False: "n1", True: "None"}}[number]


def test_a_number_without_a_bug_is_an_error() -> None:
    with pytest.raises(KeyError):
        by_number(1)
