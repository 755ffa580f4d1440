"""Texts that are no history, or one that Python reads otherwise than it was meant: no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger.jepsen_like.foreign import edn
from dledger.jepsen_like.foreign.judged import judge_file, judge_text

WRITE = {"process": 0, "type": "ok", "f": "write"}
READ = {"process": 1, "type": "ok", "f": "read"}


def written_and_read(written: str, read: str) -> str:
    return (
        f"{{:process 0, :type :ok, :f :write, :value {written}}}\n"
        f"{{:process 1, :type :ok, :f :read, :value {read}}}"
    )


def nested(depth: int, inner: str) -> str:
    return "[" * depth + inner + "]" * depth


@pytest.mark.parametrize(
    ("written", "read", "validity"),
    [
        ("{:a 1 :b [2 #{3}]}", "{:b [2 #{3}], :a 1}", "valid"),
        ("{:a 1 :b 2}", "{:b 1 :a 2}", "invalid"),
        ("{:a {:b 1}}", '"{:a {:b 1}}"', "invalid"),
        ("#x {:a 1 :b 2}", "#x {:b 2 :a 1}", "valid"),
        ("true", "1", "invalid"),
        ("[0]", "[false]", "invalid"),
        ("true", "true", "valid"),
    ],
)
def test_values_are_equal_as_in_edn(written: str, read: str, validity: str) -> None:
    verdict = judge_text(written_and_read(written, read)).verdict
    assert verdict.validity == validity


def test_a_value_that_is_a_map_is_shown_as_one() -> None:
    (violation,) = judge_text(written_and_read("{:b 1 :a 2}", "{:b 3}")).verdict.violations
    assert "reads {:b 3}" in violation.detail
    assert "{:a 2, :b 1}" in violation.detail


def test_objects_of_json_are_equal_in_any_order() -> None:
    rows = [{**WRITE, "value": {"a": 1, "b": 2}}, {**READ, "value": {"b": 2, "a": 1}}]
    assert judge_text(json.dumps(rows)).verdict.validity == "valid"


def test_lists_of_json_may_be_elements_of_a_set() -> None:
    rows = [{**WRITE, "f": "add", "value": [1, 2]}, {**READ, "value": [[1, 2]]}]
    assert judge_text(json.dumps(rows)).verdict.validity == "valid"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"process":0,"type":"ok","f":"add","value":1}\n\n{"process":0,"ty', "line 3 is no JSON"),
        ('{"type":"ok","type":"fail","f":"add","value":1}', "an object has a key twice"),
        ("\n{:type :ok, :type :fail, :f :add}", "line 2: a map has a key twice"),
        ("{:type :ok, :f :read, :value #{1 1}}", "line 1: a set has a member twice"),
        (
            "{:index 3, :type :ok, :f :add, :value 1}\n{:index 3, :type :ok, :f :add, :value 2}",
            "rows 0 and 1 both have the index 3",
        ),
        (
            "{:type :invoke, :f :write, :value 1} {:type :ok, :f :read, :value 1}",
            "row 1 completes 'read', and its process had invoked 'write' in row 0",
        ),
        (
            json.dumps([{**WRITE, "value": "\ud800"}, {**READ, "value": "\udfff"}]),
            "row 0 holds half of a character",
        ),
        (written_and_read('"\\ud800"', "nil"), "row 0 holds half of a character"),
        (
            f'{{"f":"write","type":"ok","value":{nested(900, "1")}}}\n'
            f'{{"f":"read","type":"ok","value":{nested(900, "2")}}}',
            "row 0 has values nested more than 200 deep",
        ),
    ],
)
def test_what_is_no_history_is_unknown(text: str, why: str) -> None:
    verdict = judge_text(text).verdict
    assert (verdict.validity, verdict.violations) == ("unknown", ())
    assert why in verdict.reason


def test_halves_of_one_character_are_one_character() -> None:
    assert next(edn.values('"\\ud83d\\ude00"')) == "\U0001f600"


def test_rows_without_an_index_may_say_so() -> None:
    text = written_and_read("1", "1").replace("{:process", "{:index -1, :process")
    assert judge_text(text).verdict.validity == "valid"


def test_a_client_may_have_a_name() -> None:
    rows = [{**WRITE, "value": 1}, {**READ, "process": "second", "value": 2}]
    verdict = judge_text(json.dumps(rows)).verdict
    assert [one.name for one in verdict.violations] == ["nonlinearizable"]


def test_a_mark_of_its_encoding_may_begin_a_file(tmp_path: Path) -> None:
    path = tmp_path / "history.edn"
    path.write_text(written_and_read("1", "1"), "utf-8-sig")
    assert judge_file(path, None).verdict.validity == "valid"
