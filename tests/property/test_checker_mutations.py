"""The checkers checked: no alarm on a correct history, the right name for every planted anomaly."""

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from dledger.jepsen_like import checkers
from dledger.jepsen_like.checkers import (
    availability,
    consumer_offsets,
    delayed,
    locks,
    polls,
    push_group,
    queue_log,
    transactions,
)
from dledger.jepsen_like.checkers.all_checks import CHECKS, Settings, check_everything
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import NEVER, History
from tests.harness.clean_histories import clean_history, interrupted
from tests.harness.extent import EXTENT, examples
from tests.harness.fast_part import gate_part
from tests.harness.history_world import KEEPS, LATE_MAX_NS
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_facts import FACTS, RIGHT
from tests.harness.planted_scene import InapplicableError, Kind, Planted, Scene

FAST_CLEAN = 20
RIGHT_CLEAN = examples(150) * EXTENT
ALL_CLEAN = int(os.environ.get("DLEDGER_CLEAN_HISTORIES", examples(1_000) * EXTENT))
CLEAN_BLOCKS = 10
PER_FACT = 2
PER_KIND = 2
PER_KIND_SLOW = 6 * EXTENT
"""Planted histories of each kind; more than 200 over all kinds."""
TRIES = 400
"""Seeds tried for one kind: not every history has what an anomaly needs."""


CHECKERS_PAGE = Path(__file__).parents[2] / "docs" / "internals" / "simulation" / "checkers.md"
TESTS = Path(__file__).parents[1] / "unit" / "jepsen_like" / "checkers"
WITH_TESTS_OF_THEIR_OWN = (
    "pop",
    "steps",
    "lifetimes",
    "producer_order",
    "push_group",
    "retries",
    "filters",
)
"""Checkers of histories that are not drawn here: of POP, of idempotent producers, of push
consumers, of messages that are given back. Their unit tests plant what they name."""
NO_ANOMALY = ("_PREFIX", "_SUFFIX", "_TOPIC", "PROPERTY")
"""Ends of names of constants that are parts of other names."""
RECALLS = ("RECALLED", "TOO_LATE_EARLY")
"""Likewise, of `delayed`: nothing is recalled here. Planted in the unit tests of recalls."""


def anomalies() -> dict[str, dict[str, Kind]]:
    """Every anomaly a checker has a constant for: module, constant, and checker with name."""
    found: dict[str, dict[str, Kind]] = {}
    for info in pkgutil.iter_modules(checkers.__path__):
        module = importlib.import_module(f"{checkers.__name__}.{info.name}")
        if not hasattr(module, "NAME"):
            continue
        own = [name for name in module.__annotations__ if name.isupper() and name != "NAME"]
        found[info.name] = {
            name: (module.NAME, getattr(module, name))
            for name in own
            if isinstance(getattr(module, name), str) and not name.endswith(NO_ANOMALY)
        }
    return found


def test_every_anomaly_a_checker_can_name_has_a_planter() -> None:
    found = anomalies()
    for module in WITH_TESTS_OF_THEIR_OWN:
        del found[module]
    for name in RECALLS:
        del found["delayed"][name]
    assert {kind for kinds in found.values() for kind in kinds.values()} == set(PLANTERS)
    assert len(PLANTERS) * PER_KIND_SLOW >= 200


def test_anomalies_without_a_planter_have_tests_of_their_own() -> None:
    found = anomalies()
    elsewhere = {module: list(found[module]) for module in WITH_TESTS_OF_THEIR_OWN}
    elsewhere["recalls"] = list(RECALLS)
    for module, names in elsewhere.items():
        assert names, module
        said = (TESTS / f"test_{module}.py").read_text(encoding="utf-8")
        assert [name for name in names if name not in said] == [], module


def test_documentation_lists_every_anomaly() -> None:
    page = CHECKERS_PAGE.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    kinds = [kind for named in anomalies().values() for kind in named.values()]
    assert [(checker, name) for checker, name in kinds if name not in rows.get(checker, "")] == []


def test_documented_checkers_are_the_one_list_of_checks() -> None:
    page = CHECKERS_PAGE.read_text(encoding="utf-8")
    table = page[page.index("| checker | decides |") :].split("\n\n")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert documented == {*CHECKS, push_group.NAME}
    assert {name for named in anomalies().values() for name, _ in named.values()} == documented


def alarms(history: History) -> list[Violation]:
    return alarms_of(
        check_everything(history, Settings(settled=True, late_max_ns=LATE_MAX_NS, keeps=KEEPS))
    )


def alarms_of(verdicts: list[Verdict]) -> list[Violation]:
    """Return all violations; a checker that breaks is an alarm as well."""
    found: list[Violation] = []
    for verdict in verdicts:
        found += verdict.violations
        if verdict.validity == "unknown" and verdict.reason != "nothing to check":
            found.append(Violation("checker broke", verdict.checker, verdict.reason))
    return found


def expect_no_alarm(seeds: range) -> Counter[str]:
    judged: Counter[str] = Counter()
    for seed in seeds:
        history = clean_history(seed)
        verdicts = check_everything(
            history, Settings(settled=True, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
        )
        found = alarms_of(verdicts)
        assert not found, f"clean_history({seed}): {found}"
        cut = check_everything(
            interrupted(history), Settings(settled=False, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
        )
        found = alarms_of(cut)
        assert not found, f"interrupted(clean_history({seed})): {found}"
        judged.update(v.checker for v in verdicts if v.is_valid)
    return judged


def test_clean_histories_are_judged_without_alarm() -> None:
    judged = expect_no_alarm(range(FAST_CLEAN))
    assert set(judged) == {checker for checker, _ in PLANTERS}
    assert min(judged.values()) > FAST_CLEAN * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(CLEAN_BLOCKS), 1))
def test_many_clean_histories_raise_no_alarm(block: int) -> None:
    size = ALL_CLEAN // CLEAN_BLOCKS
    expect_no_alarm(range(block * size, (block + 1) * size))


def plant(kind: Kind, seed: int) -> tuple[History, Planted]:
    """Return the clean history of *seed*, spoiled.

    Raises:
        InapplicableError: It has nothing this kind could be planted in.
    """
    scene = Scene(clean_history(seed), seed)
    return scene.history, PLANTERS[kind](scene)


ORDERED: frozenset[Kind] = frozenset(
    {
        # Real time: what overlaps may have happened in either order.
        *((queue_log.NAME, name) for name in (queue_log.SEND_INVERTED, queue_log.STALE_READ)),
        *((queue_log.NAME, name) for name in (queue_log.NON_MONOTONIC, queue_log.MIN_WENT_BACK)),
        (queue_log.NAME, queue_log.FROM_THE_FUTURE),
        (consumer_offsets.NAME, consumer_offsets.BEFORE_COMMIT),
        (consumer_offsets.NAME, consumer_offsets.WENT_BACK),
        (locks.NAME, locks.TOKEN_WENT_BACK),  # leases find it: two holders at once
        (locks.NAME, locks.NOT_FENCED),
        # One client: it does one after the other.
        (locks.NAME, locks.TOKEN_AGAIN),
        (polls.NAME, polls.WENT_BACK),
        (polls.NAME, polls.SKIPPED),
        # A time between two of them.
        (availability.NAME, availability.SILENT),
        (delayed.NAME, delayed.LATE),
        (transactions.NAME, transactions.CHECKED_DECIDED),
        (transactions.NAME, transactions.CHECKED_EARLY),
    }
)
"""Anomalies that consist in the order of calls: where these overlap there is none."""


def overlap(history: History, witnesses: Collection[int]) -> None:
    """Let the operations that prove an anomaly last as long as all of them together."""
    found = {(op.parent_op_id, op.call_ns) for op in history.operations if op.op_id in witnesses}
    rows = [op for op in history.operations if (op.parent_op_id, op.call_ns) in found]
    ended = [op for op in rows if op.ret_ns != NEVER]
    call_ns = min((op.call_ns for op in rows), default=0)
    ret_ns = max((op.ret_ns for op in ended), default=0)
    for op in rows:
        op.call_ns = call_ns
    for op in ended:
        op.ret_ns = ret_ns


def expect_caught(kind: Kind, count: int) -> None:
    checker, name = kind
    caught = 0
    tries = max(TRIES, TRIES * count // PER_FACT)
    for seed in range(tries):
        try:
            history, planted = plant(kind, seed)
        except InapplicableError:
            continue
        found = alarms(history)
        where = f"{kind} planted in clean_history({seed}): {planted}, found {found}"
        ours = [violation for violation in found if violation.checker == checker]
        assert {violation.name for violation in ours} == {name}, where
        others = {(v.checker, v.name) for v in found if v.checker != checker}
        assert others <= planted.also, where
        proof = next(v.operations for v in ours if set(planted.witnesses) <= set(v.operations))
        overlap(history, proof)
        still = [set(v.operations) for v in alarms(history) if (v.checker, v.name) == kind]
        assert any(each >= set(proof) for each in still) == (kind not in ORDERED), where
        caught += 1
        if caught == count:
            return
    pytest.fail(f"{kind} could be planted only {caught} times in {tries} histories")


@pytest.mark.parametrize("kind", PLANTERS, ids=": ".join)
def test_a_planted_anomaly_is_caught_by_its_checker_and_name(kind: Kind) -> None:
    expect_caught(kind, PER_KIND)


@pytest.mark.parametrize("fact", FACTS)
def test_a_planted_fact_is_caught_by_its_checker_and_name(fact: str) -> None:
    (checker, name), planter = FACTS[fact]
    caught = 0
    for seed in range(TRIES):
        scene = Scene(clean_history(seed), seed)
        try:
            planted = planter(scene)
        except InapplicableError:
            continue
        found = alarms(scene.history)
        proofs = [set(v.operations) for v in found if (v.checker, v.name) == (checker, name)]
        where = f"{fact} in clean_history({seed}): {planted}, found {found}"
        assert any(set(planted.witnesses) <= proof for proof in proofs), where
        caught += 1
        if caught == PER_FACT:
            return
    pytest.fail(f"{fact} could be planted only {caught} times in {TRIES} histories")


@pytest.mark.slow
@pytest.mark.parametrize("change", RIGHT)
def test_what_a_correct_broker_may_show_raises_no_alarm(change: str) -> None:
    changed = 0
    for seed in range(RIGHT_CLEAN):
        scene = Scene(clean_history(seed), seed)
        try:
            RIGHT[change](scene)
        except InapplicableError:
            continue
        found = alarms(scene.history)
        assert not found, f"{change} in clean_history({seed}): {found}"
        changed += 1
    assert changed > RIGHT_CLEAN // 4


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.parametrize("kind", PLANTERS, ids=": ".join)
def test_planted_anomalies_are_caught_wherever_they_are(kind: Kind) -> None:
    expect_caught(kind, PER_KIND_SLOW)
