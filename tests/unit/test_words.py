"""Plain words: code, tests, examples and pages do without those of `tests/lint/words.txt`."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.harness.shipped_files import ROOT

WORDS_FILE: Final = ROOT / "tests" / "lint" / "words.txt"

CLEAN: Final = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
    *("client", "commitlog", "dledger", "jepsen_like", "namesrv", "remoting", "spark_jobs"),
    *("docs", "examples", "tests", "tools"),
)
"""Files and folders that keep to plain words. Only ever longer."""

LEFT_OUT: Final = (
    "commitlog/store_paths.py",  # names a file of older versions
    "tests/lint/words.txt",  # the list
    "tests/unit/test_words.py",  # shows what is found
)

SUFFIXES: Final = frozenset(
    {".py", ".md", ".txt", ".toml", ".conf", ".yaml", ".yml", ".tpl", ".j2"}
)

_CODE = re.compile(
    r"```.*?```|``[^`]+``|`[^`\n]+`|\]\([^)]*\)|https?://\S+|[\w./-]+\.(?:py|md)\b|\w+\.\w+\(",
    re.DOTALL,
)


_MARKUP = re.compile(r"<style>.*?</style>|\{[{%#].*?[}%#]\}|<[^<>]*>", re.DOTALL)
"""What a template holds beside its text."""

_ARGUMENT = re.compile(r"^ +\*{0,2}\w+:(?= )", re.MULTILINE)
"""The name of an argument, in front of what it is."""


_TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


class Use(NamedTuple):
    where: str
    line: int
    word: str


def words() -> dict[str, str]:
    """Return word to suggestions."""
    lines = [line for line in WORDS_FILE.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split(": ", 1) for line in lines)


def pattern(vocabulary: dict[str, str]) -> re.Pattern[str]:
    """Return what finds any of these words in prose, in identifiers of tests too."""
    longest_first = sorted(vocabulary, key=len, reverse=True)
    phrases = (r"\s+".join(map(re.escape, word.split())) for word in longest_first)
    initials = "".join(sorted({word[0] for word in vocabulary}))  # soon known where none begins
    return re.compile(rf"\b(?=[{initials}])(?:{'|'.join(phrases)})\b", re.IGNORECASE)


WORDS: Final = pattern(words())


def prose_of_module(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments and strings of a module, docstrings among them, each with its first line."""
    if not WORDS.search(source):  # reading all code as tokens takes long
        return
    if any("#" in line and WORDS.search(line, line.index("#")) for line in source.splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def uses(prose: str, first_line: int, where: str) -> Iterator[Use]:
    """Yield the words found in prose, code in backticks and addresses left out."""
    blank = _ARGUMENT.sub(_blank, _CODE.sub(_blank, prose))
    for found in WORDS.finditer(blank):
        word = " ".join(found[0].lower().split())
        yield Use(where, first_line + blank.count("\n", 0, found.start()), word)


def uses_in_file(path: Path) -> list[Use]:
    where = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    if path.suffix == ".j2":
        text = _MARKUP.sub(_blank, text)
    parts = prose_of_module(text) if path.suffix == ".py" else [(1, text)]
    return sorted({use for line, prose in parts for use in uses(prose, line, where)})


def clean_files() -> list[Path]:
    found: list[Path] = []
    for name in CLEAN:
        path = ROOT / name
        inside = [path]
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.suffix in SUFFIXES]
        found += [
            file for file in inside if not file.relative_to(ROOT).as_posix().startswith(LEFT_OUT)
        ]
    return sorted(found)


def test_clean_files_keep_to_plain_words() -> None:
    files = clean_files()
    for folder in ("docs", "examples", "tests"):
        assert any(path.is_relative_to(ROOT / folder) for path in files), folder
    found = [use for path in files for use in uses_in_file(path)]
    advice = words()
    assert not found, "\n".join(
        f"{use.where}:{use.line}: {use.word!r}: write {advice[use.word]}" for use in found
    )


def test_names_of_tests_are_plain_and_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in _TEST.findall(path.read_text())
        if WORDS.search(name.replace("_", " ")) or len(name) > 60
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# nobody is here\n", [(1, "nobody")]),
        ("x = 1  # fine\n", []),
        (
            'def f():\n    """First.\n\n    It says so much.\n    """\n',
            [(4, "says"), (4, "so much")],
        ),
        ("raise ValueError('the reign is over')\n", [(1, "reign")]),
        ("await clock.sleep(1)\n", []),
        ("script = 'import time; time.sleep(1)'\n", []),
        ('"""It waits for\n  ever."""\n', [(1, "for ever")]),
        ('"""Calls `clock.sleep` and ``who``."""\n', []),
        ('x = f"{a} was told {b}"\n', [(1, "told")]),
    ],
)
def test_words_are_found(source: str, expected: list[tuple[int, str]]) -> None:
    found = sorted(
        (use.line, use.word)
        for line, prose in prose_of_module(source)
        for use in uses(prose, line, "module")
    )
    assert found == expected


def test_every_word_has_a_suggestion() -> None:
    assert all(advice.strip() for advice in words().values())
    assert len(words()) > 50
