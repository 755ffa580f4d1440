"""Planted bugs: every patch fits the product as it is, and acts when its head states."""

import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.mutants.patches import (
    FOLDER,
    NOTHING,
    REAL_BROKERS,
    SIMULATOR,
    UNIT_TESTS,
    StalePatchError,
    function_in,
    parse,
    plant,
    read_patches,
)
from tests.mutants.planted_chance import acts
from tests.mutants.trees import environment_of, plant_tree, planted_text, sources_of

pytestmark = pytest.mark.slow

PATCHES = read_patches()

TEXT = '''\
number: 7
name: two is three
acts: a.py A.two when self.term > 2
finds: simulator, real brokers
preset: locks
fast: yes

--- a/a.py
+++ b/a.py
@@ -4,5 +4,5 @@
     def two(self) -> int:
         """Return two."""
-        return 2
+        return 3

     def one(self) -> int:
'''

SOURCE = '''\
class A:
    term = 1

    def two(self) -> int:
        """Return two."""
        return 2

    def one(self) -> int:
        return 1
'''


@lru_cache(maxsize=256)  # many bugs are in one file
def tree_of(source: str) -> str:
    return ast.dump(ast.parse(source))


@pytest.mark.parametrize("number", PATCHES)
def test_patch_applies_compiles_and_differs(number: int) -> None:
    patch = PATCHES[number]
    sources = sources_of(patch)
    for path, text in planted_text(patch).items():
        assert ast.dump(ast.parse(text)) != tree_of(sources[path])


def test_patches_have_numbers_names_and_files_of_their_own() -> None:
    assert len(PATCHES) >= 150
    assert len({patch.name for patch in PATCHES.values()}) == len(PATCHES)
    assert sum(patch.fast for patch in PATCHES.values()) >= 20
    assert sum(REAL_BROKERS in patch.finds for patch in PATCHES.values()) >= 12
    known = {SIMULATOR, REAL_BROKERS, UNIT_TESTS, NOTHING}
    assert {find for patch in PATCHES.values() for find in patch.finds} <= known
    for path in FOLDER.iterdir():
        assert path.suffix == ".patch"
        assert path.name.startswith(f"{parse(path.read_text()).number:03}-")


def test_patches_act_from_the_start_or_by_chance() -> None:
    assert not [patch.number for patch in PATCHES.values() if patch.sleeps]
    assert sum(patch.chance < 1 for patch in PATCHES.values()) >= 10


def test_what_only_unit_tests_find_has_a_reason() -> None:
    assert all(patch.unseen for patch in PATCHES.values() if patch.finds == (UNIT_TESTS,))


def test_parse_reads_head_and_hunks() -> None:
    patch = parse(TEXT)
    assert (patch.number, patch.name, patch.preset, patch.fast) == (
        7,
        "two is three",
        "locks",
        True,
    )
    assert patch.finds == (SIMULATOR, REAL_BROKERS)
    assert patch.acting == (("a.py", "A.two", "self.term > 2"),)
    (hunk,) = patch.hunks["a.py"]
    assert len(hunk.before) == len(hunk.after) == 5


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("preset:", "preference:"),
        TEXT.replace("acts: a.py A.two when self.term > 2", "acts: later"),
        TEXT.replace("acts: a.py A.two when self.term > 2", "acts: by chance 2"),
        TEXT.partition("\n\n")[0],
        TEXT.replace("@@ -4", "!! -4"),
        TEXT.replace("name: two is three", "two is three"),
    ],
)
def test_parse_refuses_what_is_no_patch(text: str) -> None:
    with pytest.raises(ValueError, match=r"patch|acts|line|field"):
        parse(text)


def test_plant_keeps_the_products_function_until_the_bug_acts() -> None:
    planted = plant(parse(TEXT), {"a.py": SOURCE})["a.py"]
    scope: dict[str, Any] = {}
    exec(planted, scope)
    thing = scope["A"]()
    assert (thing.two(), thing.one()) == (2, 1)
    thing.term = 3
    assert (thing.two(), thing.one()) == (3, 1)
    assert scope["A"].two.__doc__ == "Return two."


def test_plant_by_chance_keeps_both_functions() -> None:
    text = TEXT.replace("acts: a.py A.two when self.term > 2", "acts: by chance 0.25")
    patch = parse(text)
    assert (patch.chance, patch.sleeps, patch.acting) == (0.25, False, ())
    planted = plant(patch, {"a.py": SOURCE})["a.py"]
    assert "if __import__('planted_chance').acts(7, 0.25):" in planted
    assert planted.count("return 3") == planted.count("return 2") == 1


def test_plant_by_chance_refuses_what_is_no_function() -> None:
    text = TEXT.replace("acts: a.py A.two when self.term > 2", "acts: by chance 0.5")
    wide = text.replace(
        "@@ -4,5 +4,5 @@\n", "@@ -1,5 +1,5 @@\n class A:\n-    term = 1\n+    term = 2\n\n"
    )
    with pytest.raises(StalePatchError, match="only functions"):
        plant(parse(wide), {"a.py": SOURCE})


def test_chance_is_drawn_from_number_and_time() -> None:
    async def draws(number: int) -> list[bool]:
        found = []
        for _ in range(400):
            found.append(acts(number, 0.25))
            await trio.sleep(0.5)
        return found

    one, again, other = (
        trio.run(draws, number, clock=MockClock(autojump_threshold=0.0)) for number in (7, 7, 8)
    )
    assert one == again != other
    assert 60 < sum(one) < 140
    assert acts(7, 0.25)  # outside of trio no time passes


def test_plant_at_once_is_the_diff_alone() -> None:
    text = TEXT.replace("acts: a.py A.two when self.term > 2", "acts: at once")
    assert plant(parse(text), {"a.py": SOURCE})["a.py"] == SOURCE.replace("return 2", "return 3")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (SOURCE.replace("return 2", "return 1 + 1"), "0 times"),
        (SOURCE + SOURCE, "2 times"),
        ("", "0 times"),
    ],
)
def test_plant_refuses_text_that_has_moved_on(source: str, says: str) -> None:
    with pytest.raises(StalePatchError, match=says):
        plant(parse(TEXT), {"a.py": source})


def test_plant_refuses_a_missing_file_function_or_grammar() -> None:
    with pytest.raises(StalePatchError, match="there is no"):
        plant(parse(TEXT), {})
    with pytest.raises(StalePatchError, match=r"no A\.three"):
        plant(parse(TEXT.replace("A.two", "A.three")), {"a.py": SOURCE})
    broken = TEXT.replace("+        return 3", "+        return (").replace(
        "A.two when", "A.one when"
    )
    with pytest.raises(StalePatchError, match=r"a\.py"):
        plant(parse(broken), {"a.py": SOURCE})


def test_function_in_finds_methods_and_functions() -> None:
    text = "def f(): ...\nclass A:\n    async def g(self): ...\n"
    assert isinstance(function_in(text, "f"), ast.FunctionDef)
    assert isinstance(function_in(text, "A.g"), ast.AsyncFunctionDef)
    assert function_in(text, "A.h") is None
    assert function_in(text, "A") is None


VOTE = (
    "import cbor2\n"
    "from dledger.raft.{module} import TermVote\n"
    "vote = TermVote.__new__(TermVote)\n"
    "vote.term, vote.voted_for, vote.version = {term}, 'n1', 1\n"
    "print(cbor2.loads(vote.snapshot()[1])[1])"
)


def output_of(code: str, tree: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment_of(tree),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_an_interpreter_runs_the_tree_with_the_bug(tmp_path: Path) -> None:
    """Bug 24: the vote is not part of what is written."""
    tree = plant_tree(24, tmp_path)
    (path,) = PATCHES[24].hunks
    assert output_of(VOTE.format(module=Path(path).stem, term=7), tree) == "None"


def test_a_bug_changes_what_importers_by_name_get(tmp_path: Path) -> None:
    """Bug 92: deliveries are recorded apart from their progress."""
    module = next(path for path in PATCHES[92].hunks if "delayed_message" in path)
    code = (
        "from dledger.state.state_record import TimersChange\n"
        f"from {module[:-3].replace('/', '.')} import delivery_batch\n"
        "print(*(len(delivery_batch([], TimersChange((at,))).sizes) for at in (12, 19)))"
    )
    assert output_of(code, plant_tree(92, tmp_path)) == "0 0"


def test_a_number_without_a_bug_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        plant_tree(1, tmp_path)
    assert not list(tmp_path.iterdir())
