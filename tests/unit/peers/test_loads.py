"""What load programs are given and print, and programs that are missing or end badly."""

from __future__ import annotations

import trio

from dledger.output import CliError
from tests.peers.loads import CASE, NOT_BEFORE_MS, Lines, Result, arguments
from tests.peers.rounds import reason
from tests.peers.sdk_load import Tally
from tests.peers.tools import NATS_SERVER, NATS_VERSION, ROCKETMQ_VERSION, SOURCES, absent

RESULT = (
    'result {"messages": 7, "failed": 1, "seconds": 2.5, "p50_ms": 1.0, "p99_ms": 2.0,'
    ' "p999_ms": 3.0}'
)


def test_arguments_of_batches() -> None:
    given = arguments(CASE["batches"], "a:1", "t", warm_s=0.5, seconds=2.0, backlog=9_000)
    assert given == ["send", "a:1", "t", "16", "100", "256", "0.5", "2", "9000"]


def test_lines_give_the_window_and_the_result() -> None:
    seen: list[str] = []
    lines = Lines(on_begin=lambda: seen.append("begin"), on_end=lambda: seen.append("end"))
    for line in ("RocketMQLog:WARN no appenders", "begin", "end", RESULT):
        lines.take(line)
    assert seen == ["begin", "end"]
    assert lines.result == Result(7, 1, 2.5, 1.0, 2.0, 3.0)


def test_gap_ends_with_a_send_that_began_after_the_kill() -> None:
    lines = Lines()
    lines.take("ack 990 995")
    lines.killed(1000)
    gaps: list[float | None] = []
    for line in ("999 1400", f"{999 + NOT_BEFORE_MS} 1450", f"{1000 + NOT_BEFORE_MS} 1500"):
        lines.take(f"ack {line}")
        gaps.append(lines.gap_ms)
    lines.take("ack 1600 1700")
    gaps.append(lines.gap_ms)
    assert gaps == [None, None, 500, 500]
    assert lines.acks == 5


def test_gap_is_of_the_newest_kill() -> None:
    lines = Lines(gap_ms=500.0)
    lines.killed(2000)
    gaps = [lines.gap_ms]
    lines.take("ack 2100 2200")
    assert [*gaps, lines.gap_ms] == [None, 200]


def test_tally_counts_only_what_ends_in_the_window() -> None:
    tally = Tally()
    tally.stored(0.0, 1)
    tally.not_stored(1)
    tally.measuring = True
    tally.stored(0.0, 100)
    tally.not_stored(2)
    tally.measuring = False
    tally.stored(0.0, 1)
    assert (tally.messages, tally.failed, len(tally.times_s)) == (100, 2, 1)
    tally.times_s = [value / 1000 for value in range(1000, 0, -1)]
    assert tally.result(1.5) == Result(100, 2, 1.5, 501.0, 991.0, 1000.0)
    assert Tally().result(1.0) == Result(0, 0, 1.0, 0.0, 0.0, 0.0)


def test_missing_tools_are_one_sentence() -> None:
    needed = {"Go": ("go",), "Java": ("java", "javac", "mvn")}
    assert absent(needed, lambda name: f"/bin/{name}") == ""
    only_jre = {"go": None, "java": "/bin/java", "javac": None, "mvn": "/bin/mvn"}
    assert absent(needed, only_jre.get) == (
        "Go (go) and Java (javac) must be on the PATH: not found."
    )


def test_versions_of_rivals_are_those_of_their_files() -> None:
    assert NATS_SERVER.endswith(f"@v{NATS_VERSION}")
    pom = (SOURCES / "pom.xml").read_text()
    assert pom.count(f"<version>{ROCKETMQ_VERSION}</version>") == 3


def test_reason_of_a_group_is_its_first_error_in_one_line() -> None:
    inner = ExceptionGroup("inner", [CliError("no\n  leader"), OSError("late")])
    assert reason(ExceptionGroup("outer", [inner])) == "no leader"
    assert reason(trio.TooSlowError()) == "TooSlowError"
    assert len(reason(OSError("x" * 999))) == 300
