"""The page about the command line names every command there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.cli.main import ABOUT_OTHERS, COMMANDS, build_app

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "command-line.md").read_text()
NAMES = sorted({name for name, *_ in COMMANDS} | set(ABOUT_OTHERS))


@pytest.mark.parametrize("name", NAMES)
def test_a_command_stands_on_the_page(name: str) -> None:
    assert f"`dledger {name}" in PAGE


def test_every_command_has_a_word_about_it_in_the_help() -> None:
    app = build_app()
    assert {name for name in app if not name.startswith("-")} == set(NAMES)
