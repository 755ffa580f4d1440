"""The page about the command line names every command there is; other pages name no other."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from dledger.cli.main import COMMANDS as DLEDGER_COMMANDS
from dledger.cli.main import build_app
from tests.harness.mqadmin_commands import ACCOUNTS, COMMANDS, NOT_THERE, WORKS, stated

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "command-line.md").read_text()
MQADMIN_PAGE = (DOCS / "operate" / "from-mqadmin.md").read_text()
NAMES = sorted(name for name, *_ in DLEDGER_COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_stands_on_the_page(name: str) -> None:
    assert f"`dledger {name}" in PAGE


def test_every_command_has_a_word_about_it_in_the_help() -> None:
    app = build_app()
    assert sorted(name for name in app if not name.startswith("-")) == NAMES


def described(app: App, path: str = "dledger") -> Iterator[tuple[str, str | None]]:
    """Yield every command, argument and option below *app* with its description."""
    yield path, app.help
    if app.default_command is not None:
        for argument in app.assemble_argument_collection():
            if argument.show:
                yield f"{path} {argument.name}", argument.parameter.help
    for name in app:
        if not name.startswith("-"):
            yield from described(app[name], f"{path} {name}")


def test_every_command_and_option_has_a_description() -> None:
    texts = dict(described(build_app()))
    assert [name for name, text in texts.items() if not text] == []
    assert len(texts) > 200


def is_there(command: str, app: App) -> bool:
    """Return whether a command with these sub-commands and options can be typed."""
    _, *words = command.split()
    options = [word for word in words if word.startswith("-")]
    for word in (word for word in words if word.islower() and word not in options):
        if word not in list(app):
            return False
        app = app[word]
    if app.default_command is None:
        return False
    there = {name for argument in app.assemble_argument_collection() for name in argument.names}
    return there >= set(options)


def test_the_mqadmin_table_names_commands_that_exist() -> None:
    commands = sorted(set(re.findall(r"`(dledger [^`]+)`", MQADMIN_PAGE)))
    app = build_app()
    assert [command for command in commands if not is_there(command, app)] == []
    assert len(commands) > 40
    for wrong in ("dledger topics ls", "dledger topic list", "dledger topic ls --all", "dledger"):
        assert not is_there(wrong, app)


def test_the_mqadmin_table_has_a_counterpart_or_none() -> None:
    rows = [line.split(" | ") for line in MQADMIN_PAGE.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if "dledger " not in row[1] and row[1] != "no counterpart"] == []
    names = [name for row in rows for name in re.findall(r"`([a-zA-Z]+)[ `]", row[0])]
    daily = {"clusterList", "topicStatus", "consumerProgress", "resetOffsetByTime", "printMsg"}
    assert daily <= set(names)


def test_page_of_outcomes_has_each_mqadmin_command() -> None:
    page = stated()
    assert page.keys() == COMMANDS.keys()
    rows = [line.split(" | ")[0] for line in MQADMIN_PAGE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-zA-Z]+)[ `]", row)}
    assert named <= COMMANDS.keys() | ACCOUNTS
    for command, (older, newer) in page.items():
        assert older in (WORKS, NOT_THERE), f"{command}: all that 4.9.7 has works"
        assert newer
