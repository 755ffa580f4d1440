"""The demo: its plan, its lines for people, and what it makes of a run."""

from collections import Counter
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.jepsen_like.chaos.demo import KEPT, Story, demo_plan, facts_of, show
from dledger.jepsen_like.chaos.runner import Ran
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import (
    Event,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from dledger.jepsen_like.plans.plan import Kind, decode_plan, encode_plan
from tests.harness.rows import row

MS = 1_000_000
PLAN = demo_plan(3, 4.0, 6_000.0)
SOUND = (Verdict("queue_log", "valid"), Verdict("replicas", "valid"))


def send(op_id: int, call_ms: int, ret_ms: int, outcome: Outcome) -> Operation:
    return row(op_id, F.SEND, call_ms * MS, ret_ms * MS, outcome=outcome, topic="orders")


def ran(*verdicts: Verdict) -> Ran:
    """Return a run with a kill of the leader at 100 ms."""
    sends = [
        send(0, 10, 20, Outcome.OK),
        send(1, 90, 950, Outcome.OK),  # begun before the kill: may be the old leader's
        send(2, 120, 900, Outcome.OK),
        send(3, 130, 140, Outcome.FAIL),
        send(4, 130, 0, Outcome.INFO),
    ]
    events = [
        Event(0, 0, "role", node="n0", detail="leader term 1"),
        Event(100 * MS, 100 * MS, "kill", "leader", "n0"),
    ]
    reads = [ReplicaRead(MS, name, "orders", 0, 0, (1, 2, 3)) for name in ("n0", "n1", "n2")]
    history = History(RunHeader("r"), sends, events)
    history.replica_reads += reads
    return Ran(PLAN, Path("folder"), list(verdicts), history, Counter(kill=1))


def test_demo_plan_kills_the_leader_once_under_load() -> None:
    (kill,) = PLAN.steps
    assert (kill.kind, kill.target, kill.at_ms, kill.end_ms) == (Kind.KILL, "leader", 4_000, 6_000)
    assert PLAN.duration_ms == 8_000
    assert (PLAN.members, PLAN.name_servers) == (3, 1)
    assert decode_plan(encode_plan(PLAN)) == PLAN
    assert PLAN.workload.producers > 0


def test_facts_of_a_good_run() -> None:
    facts = facts_of(ran(*SOUND))
    assert facts["kept"] is True
    assert (facts["acknowledged"], facts["not_stored"], facts["unknown"]) == (3, 1, 1)
    assert (facts["lost"], facts["duplicated"], facts["broken"]) == (0, 0, 0)
    assert facts["delivered"] == 3
    assert facts["failover_ms"] == 800.0
    assert facts["replicas_equal"] is True
    assert facts["checked"] == ["queue_log", "replicas"]


def test_facts_name_lost_doubled_and_other_violations() -> None:
    found = (
        Violation("acknowledged message lost", "orders/0", "value 7 is nowhere", checker="x"),
        Violation("message stored twice", "orders/0", "value 8", checker="x"),
        Violation("offset changed", "orders/0", "offset 3", checker="x"),
    )
    facts = facts_of(ran(*SOUND, Verdict("x", "invalid", found)))
    assert facts["kept"] is False
    assert (facts["lost"], facts["duplicated"], facts["broken"]) == (1, 1, 1)
    assert [each["name"] for each in facts["violations"]] == [each.name for each in found]


@pytest.mark.parametrize(
    "verdicts",
    [
        (Verdict("queue_log", "valid"),),
        (Verdict("queue_log", "valid"), Verdict("replicas", "unknown")),
        (*SOUND, Verdict("final_read", "invalid", (Violation("unreadable", "n1", "x"),))),
    ],
)
def test_replicas_are_equal_only_if_proved(verdicts: tuple[Verdict, ...]) -> None:
    assert facts_of(ran(*verdicts))["replicas_equal"] is False


def test_show_prints_the_verdict_and_sets_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(facts_of(ran(*SOUND)), "table") == 0
    printed = capsys.readouterr().out
    assert KEPT in printed
    assert "acknowledged" in printed
    assert show(facts_of(ran(*SOUND, Verdict("x", "unknown", reason="it broke"))), "table") == 1
    found = (Violation("acknowledged message lost", "orders/0", "value 7 is nowhere"),)
    assert show(facts_of(ran(*SOUND, Verdict("x", "invalid", found))), "table") == 1
    printed = capsys.readouterr().out
    assert "The check found a violation." in printed
    assert "value 7 is nowhere" in printed


def test_story_has_a_line_for_what_happens() -> None:
    now_s, lines = [10.0], list[str]()
    story = Story(PLAN, lines.append, lambda: now_s[0])
    story.progress("load and faults", Counter(send_ok=0), Counter())
    story.event(Event(0, 0, "role", node="n1", detail="leader term 1"), False)
    now_s[0] = 12.0
    story.progress("load and faults", Counter(send_ok=6_000), Counter())
    now_s[0] = 12.5
    story.progress("load and faults", Counter(send_ok=7_000), Counter())
    kill = Event(0, 0, "kill", "leader")
    story.event(kill, False)
    story.event(Event(0, 0, "role", node="n1", detail="silent"), False)
    story.event(Event(0, 0, "role", node="n2", detail="leader term 2"), False)
    kill.node = "n1"
    story.event(kill, True)
    story.progress("healing", Counter(send_ok=9_000), Counter(kill=1))
    assert [line.strip() for line in lines] == [
        *("0.0 s  starting a NameServer and 3 brokers", "0.0 s  clients send and read"),
        *("0.0 s  n1 leads, term 1", "2.0 s      6,000 acknowledged     3,000/s"),
        *("2.5 s  SIGKILL to n1, the leader", "2.5 s  n2 leads, term 2", "2.5 s  started n1 again"),
        "2.5 s  no more load; every broker runs",
    ]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["--brokers", "2"], "--brokers: 3 or 5"),
        (["--keep", "."], ". is not empty"),
        (["--check", "."], ". holds no run: plan.json is missing"),
        (["--seconds", "0"], "--seconds"),
    ],
)
def test_demo_refuses_what_it_cannot_do(
    tokens: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *tokens]) == 2
    assert text in capsys.readouterr().err
