"""What load programs are given and print."""

from __future__ import annotations

import time

import pytest

from dledger.cli.bench_load import Tally
from tools.bench.loads import CASE, NOT_BEFORE_MS, Lines, Result, arguments
from tools.bench.sdk_load import Reports, result_of

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


def test_result_has_only_what_ends_in_the_window() -> None:
    tally = Tally(10.0, 20.0)
    tally.failed("unknown", 9.0, 1)
    tally.stored(8.0, 9.0, 1)
    tally.stored(12.0, 12.5, 100)
    tally.failed("unknown", 13.0, 2)
    tally.stored(19.0, 20.5, 1)
    assert result_of(tally) == Result(100, 2, 10.0, 500.0, 500.0, 500.0)
    tally.latencies_s = [value / 1000 for value in range(1000, 0, -1)]
    assert result_of(tally) == Result(100, 2, 10.0, 501.0, 991.0, 1000.0)
    assert result_of(Tally(0.0, 1.0)) == Result(0, 0, 1.0, 0.0, 0.0, 0.0)


def test_acknowledgements_are_printed_once_a_millisecond(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    report = Reports()
    for began_s, ended_s in ((0.5, 1.0), (0.6, 1.0005), (0.7, 1.25)):
        report(began_s, ended_s)
    assert capsys.readouterr().out == "ack 1000500 1001000\nack 1000700 1001250\n"
