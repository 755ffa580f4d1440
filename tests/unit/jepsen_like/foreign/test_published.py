"""Anomalies that Jepsen, Elle and Knossos published, retyped: each has its name here too."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.foreign import register
from dledger.jepsen_like.foreign.edn import Keyword, Tagged, text_of
from dledger.jepsen_like.foreign.judged import Chosen, judge_text


def names(verdict: Verdict) -> set[str]:
    return {violation.name for violation in verdict.violations}


def judged(text: str, workload: Chosen | None = None) -> Verdict:
    return judge_text(text, workload).verdict


def transactions(*reported: str) -> str:
    """Return transactions that overlap: ``ax1`` appends 1 to x, ``rx12`` reads [1 2] from x.

    A ``!`` in front: it failed.
    """
    begins, ends = [], []
    for process, line in enumerate(reported):
        parts: list[str] = []
        asked: list[str] = []
        for part in line.strip("!").split():
            name, key, values = part[0], part[1], " ".join(part[2:])
            parts.append(f"[:append {key} {values}]" if name == "a" else f"[:r {key} [{values}]]")
            asked.append(f"[:append {key} {values}]" if name == "a" else f"[:r {key} nil]")
        head = f"{{:process {process}, :f :txn, "
        begins.append(f"{head}:type :invoke, :value [{' '.join(asked)}]}}")
        kind = "fail" if line[0] == "!" else "ok"
        ends.append(f"{head}:type :{kind}, :value [{' '.join(parts)}]}}")
    return "\n".join(begins + ends)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (("ax1 ay1", "ax2 ay2", "rx12 ry21"), {"G0"}),
        (("!ax1", "rx1"), {"G1a"}),
        (("ax1 ax2", "rx1"), {"G1b", "G-single"}),
        (("ax1 ry1", "ax2 ay1", "rx12 ry1"), {"G1c"}),
        (("ax1 ay1", "ax2 ry", "rx12"), {"G-single"}),
        (("ax1 ry", "ay1 rx"), {"G2-item"}),
        (("ax1", "ax2", "ax3", "rx13", "rx123"), {"incompatible-order"}),
        (("ax1", "rx11"), {"duplicate-elements"}),
        (("ax1", "rx12"), {"unexpected"}),
        (("ay9", "ax3 rx"), {"internal"}),
        (("ax1", "rx12 ax2"), {"future-read"}),
        (("rx ry1", "ax1", "ay1", "rx1 ry"), {"G-nonadjacent"}),
        (("ax1", "ax2 rx12", "rx1", "rx"), set()),
    ],
)
def test_transactions_have_the_names_of_elle(reported: tuple[str, ...], expected: set[str]) -> None:
    verdict = judged(transactions(*reported))
    assert names(verdict) == expected
    assert verdict.validity == ("invalid" if expected else "valid")


def test_the_example_of_elles_paper_is_a_single_rw_cycle() -> None:
    rows = [
        ("[[:append 253 1] [:append 253 3] [:append 253 4] [:append 255 2] [:append 255 3]"
         " [:append 255 4] [:append 255 5] [:append 256 1] [:append 256 2]]"),
        "[[:append 255 8] [:r 253 [1 3 4]]]",
        "[[:append 256 4] [:r 255 [2 3 4 5 8]] [:r 256 [1 2 4]] [:r 253 [1 3 4]]]",
        "[[:append 250 10] [:r 253 [1 3 4]] [:r 255 [2 3 4 5]] [:append 256 3]]",
    ]  # fmt: skip
    text = "".join(f"{{:type :invoke :value {row}}}\n{{:type :ok :value {row}}}\n" for row in rows)
    verdict = judged(text)
    (violation,) = verdict.violations
    assert (violation.name, set(violation.operations)) == ("G-single", {3, 5, 7})
    assert "row 7 read 255 before 8 was appended (row 3)" in violation.detail
    assert "row 5 appended 4 to 256, read without 3 (row 7)" in violation.detail


def test_order_that_time_contradicts_is_named_realtime() -> None:
    rows = [("0", "[[:append x 1]]"), ("1", "[[:append x 2]]"), ("2", "[[:r x [1]]]"),
            ("3", "[[:r x [1 2]]]")]  # fmt: skip
    text = "".join(
        f"{{:process {p}, :type :invoke, :value {v}}} {{:process {p}, :type :ok, :value {v}}}"
        for p, v in rows
    )
    (violation,) = judged(text).violations
    assert violation.name == "G-single-realtime"
    assert violation.operations == (5, 3)


def kafka(*reported: str) -> str:
    """Return rows that are completions only, as the tests of the workload have them."""
    return "\n".join(f"{{{row}}}" for row in reported)


SENDS = ":process 9, :type :ok, :f :send, :value "
POLLS = ":type :ok, :f :poll, :value "


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((":process 1, :type :fail, :f :send, :value [[:send x 2] [:send y 3]]",
          f":process 2, {POLLS}[[:poll {{x [[0 2] [1 3]]}}]]"), {"G1a", "phantom value"}),
        ((f"{SENDS}[[:send x [0 :a]]]", f"{SENDS}[[:send x [1 :b]] [:send x [3 :d]]]",
          f"{SENDS}[[:send x [2 :c]]]", f":process 1, {POLLS}[[:poll {{x [[2 :c]]}}]]"),
         {"lost-write", "nonmonotonic-send"}),
        ((f"{SENDS}[[:send x [0 :a]]]", f"{SENDS}[[:send x [1 :b]]]",
          f":process 1, {POLLS}[[:poll {{x [[0 :a] [1 :a]]}}]]"),
         {"inconsistent-offsets", "duplicate", "int-nonmonotonic-poll"}),
        ((f"{SENDS}[[:send x [0 :a]]]", f"{SENDS}[[:send x [1 :b]]]",
          f":process 1, {POLLS}[[:poll {{x [[0 :a] [1 :b]]}}]]",
          f":process 1, {POLLS}[[:poll {{x [[1 :b]]}}]]"), {"nonmonotonic-poll"}),
        ((":process 1, :type :ok, :f :txn, :value [[:send x [0 :a]] [:poll {x [[0 :a]]}]]",),
         {"precommitted-read"}),
        ((":process 1, :type :ok, :f :txn, :value [[:send x [0 :a]] [:poll {y [[0 :b]]}]]",
          ":process 2, :type :ok, :f :txn, :value [[:send y [0 :b]] [:poll {x [[0 :a]]}]]"),
         {"G1c"}),
    ],
)  # fmt: skip
def test_logs_have_the_names_of_the_kafka_workload(
    rows: tuple[str, ...], expected: set[str]
) -> None:
    assert names(judged(kafka(*rows), "kafka")) == expected


def test_polls_skip_what_others_sent_or_found() -> None:
    sends = (f"{SENDS}[[:send x [{off} :{v}]]]" for off, v in enumerate("abcdefg", 1) if off != 5)
    polls = [(0, "[1 :a] [2 :b]"), (1, "[3 :c]"), (0, "[4 :d]"), (0, "[7 :g]")]
    rows = (f":process {p}, {POLLS}[[:poll {{x [{found}]}}]]" for p, found in polls)
    verdict = judged(kafka(*sends, *rows))
    skips = [one for one in verdict.violations if one.name == "poll-skip"]
    assert [one.operations for one in skips] == [(6, 8), (8, 9)]
    assert ":c between" in skips[0].detail.replace('"c"', ":c")
    subscribed = kafka(":process 0, :type :ok, :f :subscribe, :value [x]")
    allowed = judged(f"{subscribed} {kafka(*sends, *rows)}")
    assert "poll-skip" not in names(allowed)


def register_rows(*reported: tuple[int, str, str, Any]) -> str:
    return "".join(
        f"{{:process {p}, :type :{kind}, :f :{f}, :value {text_of(value)}}}\n"
        for p, kind, f, value in reported
    )


def test_registers_of_knossos_are_judged_alike() -> None:
    three = register_rows(
        (0, "invoke", "write", 0), (0, "ok", "write", 0), (1, "invoke", "read", None),
        (2, "invoke", "write", 4), (1, "ok", "read", 3), (2, "ok", "write", 4),
        (3, "invoke", "read", None), (3, "ok", "read", 4),
    )  # fmt: skip
    (violation,) = judged(three).violations
    assert (violation.name, violation.operations) == ("nonlinearizable", (1, 4))
    assert "row 4 reads 3" in violation.detail
    assert "the value was 0" in violation.detail
    failed = register_rows(
        (1, "invoke", "read", None), (101, "invoke", "write", 3), (101, "fail", "write", 3),
        (1, "ok", "read", 3),
    )  # fmt: skip
    assert judged(failed).validity == "invalid"
    still_open = register_rows(
        (4, "invoke", "write", 2), (4, "ok", "write", 2), (6, "invoke", "read", None),
        (1, "invoke", "write", 4), (1, "ok", "write", 4), (14, "invoke", "read", 4),
        (14, "ok", "read", 4), (9, "invoke", "write", 0), (9, "ok", "write", 0),
        (19, "invoke", "read", 0), (19, "ok", "read", 0),
    )  # fmt: skip
    assert judged(still_open).validity == "valid"


def test_keys_of_registers_are_judged_apart() -> None:
    rows = [(0, "invoke", "write", (7, 1)), (0, "ok", "write", (7, 1)),
            (1, "invoke", "read", (8, None)), (1, "ok", "read", (8, 1))]  # fmt: skip
    (violation,) = judged(register_rows(*rows)).violations
    assert violation.subject == "8"
    good = [*rows[:2], (1, "invoke", "read", (7, None)), (1, "ok", "read", (7, 1))]
    verdict = judged(register_rows(*good))
    assert (verdict.validity, verdict.counts["registers"]) == ("valid", 1)


def test_a_register_with_too_many_states_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "STATES_MAX", 3_000)
    rows: list[tuple[int, str, str, Any]]
    rows = [(p, kind, "cas", (p % 7, p)) for p in range(40) for kind in ("invoke", "info")]
    rows = [(99, "invoke", "write", 0), (99, "ok", "write", 0),
            *((p, kind, "write", p) for p in range(40) for kind in ("invoke", "info")), *rows,
            (98, "invoke", "read", None), (98, "ok", "read", -1)]  # fmt: skip
    verdict = judged(register_rows(*rows))
    assert verdict.validity == "unknown"
    assert "unknown outcome" in verdict.reason


A = (0, "invoke", "add", 0), (0, "ok", "add", 0)
READ = (1, "invoke", "read", None)
FULL, EMPTY = (1, "ok", "read", (0,)), (1, "ok", "read", ())


@pytest.mark.parametrize(
    ("rows", "validity"),
    [
        ((*A,), "unknown"),  # never read
        ((READ, A[0], FULL, A[1]), "valid"),
        ((A[0], READ, A[1], FULL), "valid"),
        ((*A, READ, FULL), "valid"),
        ((*A, READ, EMPTY), "invalid"),  # lost
        ((READ, *A, EMPTY), "unknown"),
    ],
)
def test_sets_are_judged_as_set_full_does(rows: Any, validity: str) -> None:
    assert judged(register_rows(*rows)).validity == validity


def test_returning_element_is_stale_and_absent_one_lost() -> None:
    text = register_rows(
        (0, "invoke", "add", 0), (0, "ok", "add", 0), (1, "invoke", "add", 1),
        (2, "invoke", "read", None), (2, "ok", "read", (1,)), (1, "ok", "add", 1),
        (2, "invoke", "read", None), (3, "invoke", "read", None), (3, "ok", "read", (1,)),
        (2, "ok", "read", (0,)),
    )  # fmt: skip
    verdict = judged(text, "set")
    assert [(one.name, one.subject) for one in verdict.violations] == [("lost", "0")]
    assert (verdict.counts["stale"], verdict.counts["stable"]) == (1, 1)
    assert names(judged(text, "linearizable-set")) == {"lost", "stale"}


def test_two_reads_that_see_two_adds_in_two_orders_have_no_order() -> None:
    fork = [(0, "invoke", "add", 0), (1, "invoke", "add", 1), (2, "invoke", "read", None),
            (3, "invoke", "read", None), (2, "ok", "read", (0,)), (3, "ok", "read", (1,)),
            (0, "ok", "add", 0), (1, "ok", "add", 1)]  # fmt: skip
    assert judged(register_rows(*fork), "set").validity == "valid"
    (violation,) = judged(register_rows(*fork), "linearizable-set").violations
    assert violation.name == "nonlinearizable"
    assert len(violation.operations) == 4


def test_json_and_tagged_rows_are_read_as_plain_ones() -> None:
    lines: list[dict[str, Any]] = [
        {"process": 0, "type": "invoke", "f": "send", "value": [["send", 1, 5]]},
        {"process": 0, "type": "ok", "f": "send", "value": [["send", 1, [0, 5]]]},
        {"process": 1, "type": "ok", "f": "poll", "value": [["poll", {"1": [[0, 6]]}]]},
        {"process": "nemesis", "type": "info", "f": "kill", "value": None},
    ]
    by_line = "\n".join(map(json.dumps, lines))
    assert names(judged(by_line)) == names(judged(json.dumps(lines)))
    assert "inconsistent-offsets" in names(judged(by_line))
    tagged = [
        text_of(Tagged("jepsen.history.Op", {Keyword(k): v for k, v in row.items()}))
        for row in lines
    ]
    assert names(judged("\n".join(tagged))) == names(judged(by_line))


WHOLE = (
    transactions("ax1 ay1", "ax2 ay2", "rx12 ry21"),
    kafka(f"{SENDS}[[:send x [0 :a]]]", f":process 1, {POLLS}[[:poll {{x [[0 :a] [1 :b]]}}]]"),
    register_rows(*A, READ, FULL),
    register_rows((0, "invoke", "cas", (1, 2)), (0, "ok", "cas", (1, 2))),
)


@pytest.mark.parametrize("text", WHOLE)
def test_damaged_history_is_judged_or_unknown(text: str) -> None:
    rng = random.Random(text)
    for _ in range(1_500):
        damaged = list(text)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(3)] = rng.choice(
                (":", "[", "}", "nil", "-1", '"', "9" * 30, "{}", "#", " ", ":invoke", "0.5")
            )
        verdict = judged("".join(damaged))
        assert verdict.validity != "unknown" or verdict.reason
