"""A run in which a broker logs that another member contradicts it has a finding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from jepsen_like.chaos.log_findings import SHOWN_MAX, contradictions, read_logs
from jepsen_like.chaos.run_result import result_of
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.history.operation import History, RunHeader
from jepsen_like.plans.promised import merge_for


def line(event: str, error: str = "", level: str = "error") -> str:
    facts = {"event": event, "peer_address": ["127.0.0.1", 7], "error": error, "level": level}
    return json.dumps(facts) + "\n"


QUIET = line("peer_refused", "not the peer_contradicts we look for") + line("leads", level="info")


def test_a_contradiction_in_a_log_makes_a_run_invalid(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("n0", "n1", "n2")}
    logs["n0"].write_text(QUIET)
    logs["n1"].write_text(QUIET + line("peer_contradicts", "entry 7 of term 2 is another one"))
    verdicts = [Verdict("total_queue", "valid"), *read_logs(logs)]
    verdict = merge_for(None, verdicts)
    assert verdict.validity == "invalid"
    (found,) = verdict.violations
    assert (found.checker, found.subject) == ("broker_logs", "n1")
    assert found.detail == "entry 7 of term 2 is another one (from ['127.0.0.1', 7])"
    result = result_of(History(RunHeader("r")), verdicts, verdict, Counter())
    assert result["verdict"] == "invalid"
    assert result["verdicts"][1]["violations"][0]["name"] == "members contradict each other"


def test_logs_without_one_say_nothing(tmp_path: Path) -> None:
    log = tmp_path / "n0.log"
    log.write_text(QUIET)
    assert read_logs({"n0": log, "n1": tmp_path / "never started.log"}) == []


def test_many_contradictions_are_shown_in_few_lines() -> None:
    lines = [line("peer_contradicts", f"entry {number}") for number in range(40)]
    found = contradictions("n2", [*lines, lines[0][:-20]])
    assert len(found) == SHOWN_MAX
    assert found[0].detail.startswith("entry 0 ")
    assert found[-1].detail.endswith(f"({42 - SHOWN_MAX} like it)")
