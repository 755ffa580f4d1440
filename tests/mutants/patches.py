"""Planted bugs as patches: what a patch file holds, and source text with the bug in it. Pure.

A file is a head and a unified diff::

    number: 21
    name: a follower acknowledges before its flush
    acts: by chance 0.2
    finds: simulator
    preset: locks

    --- a/dledger/raft/acks.py
    +++ b/dledger/raft/acks.py
    @@ -110,7 +110,7 @@
    ...

========  ==========================================================================================
number    the only thing a hunter gets
name      what is wrong
acts      when the bug acts. `at once`; or `by chance P`: each call of a function that the diff
          changes is the one with the bug with probability P, drawn from the number of the bug and
          the time, so that a plan plays the same again; or `PATH FUNCTION when EXPRESSION`, a
          line for each function: until the expression over its arguments holds, the function is
          the product's own; or `in the patch when EXPRESSION`, where the function must compute
          something first
finds     what is known to find it: `simulator`, `real brokers`, `unit tests`; or `nothing yet`,
          where no hunt has
tests     files of tests that find it, each in a line of its own; `tests.mutants named` runs them
unseen    why the simulator cannot find it, where that is known
preset    the workload that a hunt plays; else drawn ones
faults    the faults that a hunt draws from; else the usual ones
mode      the mode that every plan of a hunt has; else none
fast      `yes`: found within seconds, for continuous integration
========  ==========================================================================================

A bug is what a stranger would write: it acts from the start or by chance. The few that act late do
harm only to what an earlier state has left.
"""

import ast
import re
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

FOLDER: Final = Path(__file__).parent / "patches"
SIMULATOR: Final = "simulator"
REAL_BROKERS: Final = "real brokers"
UNIT_TESTS: Final = "unit tests"
NOTHING: Final = "nothing yet"


class StalePatchError(Exception):
    """The product's text is no longer what a planted bug was made for."""


class Acting(NamedTuple):
    """When a function of the product is the one with the bug.

    Attributes:
        path: Of the file, relative to the root.
        function: Its name, behind that of its class: ``Acks.release``.
        when: Expression over its arguments, evaluated at each call.
    """

    path: str
    function: str
    when: str


class Hunk(NamedTuple):
    """One change of a file: these lines become those."""

    before: tuple[str, ...]
    after: tuple[str, ...]


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug; see the table above."""

    number: int
    name: str
    hunks: Mapping[str, tuple[Hunk, ...]]
    """By path of the file."""
    acts: str = "at once"
    """As it is written, lines joined."""
    acting: tuple[Acting, ...] = ()
    chance: float = 1.0
    """Of each call of a changed function to be the one with the bug."""
    finds: tuple[str, ...] = (SIMULATOR,)
    tests: tuple[str, ...] = ()
    preset: str = ""
    faults: str = ""
    mode: str = ""
    unseen: str = ""
    fast: bool = False

    @property
    def sleeps(self) -> bool:
        """Whether it waits for a term, an index or the like."""
        return bool(self.acting) or "in the patch when" in self.acts


def read_patches(folder: Path = FOLDER) -> dict[int, Patch]:
    """Return all planted bugs by number, in the order of their numbers.

    Raises:
        ValueError: A file is no patch, or two have one number.
    """
    found: dict[int, Patch] = {}
    for path in sorted(folder.glob("*.patch")):
        patch = parse(path.read_text())
        if patch.number in found:
            raise ValueError(f"{path.name}: there is another patch {patch.number}")
        found[patch.number] = patch
    return dict(sorted(found.items()))


def parse(text: str) -> Patch:
    """Return the planted bug in *text*.

    Raises:
        ValueError: It is no such text.
    """
    head, blank, diff = text.partition("\n\n")
    fields: dict[str, list[str]] = {}
    for line in head.splitlines():
        name, colon, value = line.partition(": ")
        if not colon:
            raise ValueError(f"no field: {line!r}")
        fields.setdefault(name, []).append(value)
    acts, tests = fields.pop("acts"), fields.pop("tests", [])
    known = {name: " ".join(values) for name, values in fields.items()}
    patch = Patch(
        number=int(known.pop("number")),
        name=known.pop("name"),
        acts="; ".join(acts),
        acting=tuple(found for line in acts if (found := _acting(line)) is not None),
        chance=min(map(_chance, acts)),
        finds=tuple(known.pop("finds").split(", ")),
        tests=tuple(tests),
        preset=known.pop("preset", ""),
        faults=known.pop("faults", ""),
        mode=known.pop("mode", ""),
        unseen=known.pop("unseen", ""),
        fast=known.pop("fast", "no") == "yes",
        hunks=_hunks(diff),
    )
    if known or not blank or not patch.hunks:
        raise ValueError(f"patch {patch.number}: unknown fields {sorted(known)}, or no diff")
    return patch


def _acting(line: str) -> Acting | None:
    match = re.fullmatch(r"(\S+\.py) (\S+) when (.+)", line)
    if match is None and not line.startswith(("at once", "by chance ", "in the patch when ")):
        raise ValueError(f"acts: {line!r}")
    return Acting(*match.groups()) if match is not None else None


def _chance(line: str) -> float:
    """Return the probability that a line of `acts` gives.

    Raises:
        ValueError: It is no number above 0 and at most 1.
    """
    if not line.startswith("by chance "):
        return 1.0
    chance = float(line.removeprefix("by chance "))
    if not 0 < chance <= 1:
        raise ValueError(f"acts: {line!r}")
    return chance


def _hunks(diff: str) -> dict[str, tuple[Hunk, ...]]:
    found: dict[str, list[Hunk]] = {}
    path, before, after = "", list[str](), list[str]()

    def close() -> None:
        if before != after:
            found.setdefault(path, []).append(Hunk(tuple(before), tuple(after)))
        before.clear()
        after.clear()

    for line in diff.splitlines():
        if line.startswith("--- "):
            close()
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            close()
        elif line[:1] in ("", " ", "-", "+"):
            if line[:1] != "+":
                before.append(line[1:])
            if line[:1] != "-":
                after.append(line[1:])
        else:
            raise ValueError(f"no line of a diff: {line!r}")
    close()
    return {path: tuple(hunks) for path, hunks in found.items()}


# -- planting -------------------------------------------------------------------------------------


def plant(patch: Patch, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the files that the bug changes, with the bug in them.

    Args:
        sources: Text of each file that the patch names, by path.

    Raises:
        StalePatchError: The lines of a hunk do not stand in their file exactly once, the result is
            no Python, or a function whose change is to act late is not there.
    """
    planted: dict[str, str] = {}
    for path, hunks in patch.hunks.items():
        if path not in sources:
            raise StalePatchError(f"patch {patch.number}: there is no {path}")
        text = _apply(patch, path, sources[path], hunks)
        try:
            compile(text, path, "exec")
        except SyntaxError as error:
            raise StalePatchError(f"patch {patch.number}: {path}: {error}") from None
        for late in patch.acting:
            if late.path == path:
                text = _delay(patch, sources[path], text, late)
        if patch.chance < 1:
            for name in _changed_names(patch, path, sources[path], text):
                test = f"__import__('planted_chance').acts({patch.number}, {patch.chance})"
                text = _delay(patch, sources[path], text, Acting(path, name, test))
        planted[path] = text
    return planted


def _apply(patch: Patch, path: str, text: str, hunks: tuple[Hunk, ...]) -> str:
    lines = text.splitlines()
    for hunk in hunks:
        size = len(hunk.before)
        places = [
            at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.before
        ]
        if len(places) != 1:
            wanted = next(a for a, b in zip(hunk.before, hunk.after, strict=False) if a != b)
            raise StalePatchError(
                f"patch {patch.number}: {path} has the lines around {wanted.strip()!r} "
                f"{len(places)} times"
            )
        lines[places[0] : places[0] + size] = hunk.after
    return "\n".join(lines) + "\n"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_in(text: str, name: str) -> Function | None:
    """Return the function *name*, ``Class.method`` or ``function``, of a module's text."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        inner = getattr(node, "body", [])
        found = [
            each
            for each in inner
            if isinstance(each, ast.ClassDef | Function) and each.name == part
        ]
        if not found:
            return None
        node = found[-1]
    return node if isinstance(node, Function) else None


def _delay(patch: Patch, before: str, after: str, late: Acting) -> str:
    """Return *after* with a function that is the one of *before* until the bug is to act."""
    old, new = function_in(before, late.function), function_in(after, late.function)
    if old is None or new is None or ast.dump(old.args) != ast.dump(new.args):
        raise StalePatchError(f"patch {patch.number}: {late.path} has no {late.function}")
    test = ast.parse(late.when, mode="eval").body
    first, last = new.lineno, new.end_lineno
    assert last is not None
    lines = after.splitlines(keepends=True)
    indent = " " * new.col_offset
    new.decorator_list = []  # they stay where they are
    has_doc = ast.get_docstring(new) is not None
    new.body = [
        *new.body[:has_doc],
        ast.If(test, new.body[has_doc:], old.body[ast.get_docstring(old) is not None :]),
    ]
    ast.fix_missing_locations(new)
    text = textwrap.indent(ast.unparse(new), indent) + "\n"
    return "".join(lines[: first - 1]) + text + "".join(lines[last:])


def _changed_names(patch: Patch, path: str, before: str, after: str) -> list[str]:
    """Return the functions of a module and its classes that differ.

    Raises:
        StalePatchError: Something else differs, which cannot be left to chance.
    """
    own, changed = _functions_of(before), _functions_of(after)
    names = [name for name, node in changed.items() if own.get(name) != node]
    if not names or _rest_of(before) != _rest_of(after) or own.keys() != changed.keys():
        raise StalePatchError(f"patch {patch.number}: {path}: only functions act by chance")
    return names


@lru_cache(maxsize=256)  # bugs of one file follow each other
def _functions_of(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inner:
            if isinstance(each, Function):
                found[prefix + each.name] = ast.dump(each)
    return found


class _WithoutFunctions(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None


@lru_cache(maxsize=256)
def _rest_of(text: str) -> str:
    return ast.dump(_WithoutFunctions().visit(ast.parse(text)))
