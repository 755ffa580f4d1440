"""Medians, ratios and targets of the measurement beside the rivals."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.figures import Measured, Target, rank, ratio, rows_of, targets

OURS = ("ours", "64")
NATS = ("nats", "64")


def one(contender: str, case: str, number: int = 0, /, **values: Any) -> Measured:
    return Measured(contender=contender, case=case, round=number, **values)


def target(found: list[Target], what: str) -> Target:
    (only,) = [each for each in found if each.what == what]
    return only


def test_rank_is_the_nearest_one_that_was_measured() -> None:
    assert rank([], 0.5) == 0.0
    assert rank([3.0], 0.99) == 3.0
    hundred = [float(value) for value in range(100, 0, -1)]
    assert [rank(hundred, part) for part in (0.5, 0.99, 0.999)] == [51.0, 100.0, 100.0]


def test_row_has_the_median_of_its_rounds() -> None:
    rounds = [
        one("ours", "64", number, rate=rate, p50_ms=p50, failed=failed, broker_cpu_s=cpu)
        for number, (rate, p50, failed, cpu) in enumerate(
            [(10.0, 4.0, 1, 7.0), (30.0, 2.0, 0, 9.0), (20.0, 9.0, 2, 8.0)]
        )
    ]
    (row,) = rows_of(rounds)
    assert (row.rate, row.lowest, row.highest) == (20.0, 10.0, 30.0)
    assert (row.p50_ms, row.broker_cpu_s, row.failed, row.rounds) == (4.0, 8.0, 3, 3)


def test_row_leaves_failed_rounds_out_and_names_them() -> None:
    rounds = [one("nats", "1", 0, error="no leader"), one("nats", "1", 1, rate=5.0)]
    (row,) = rows_of(rounds)
    assert (row.rate, row.rounds, row.errors) == (5.0, 1, ("no leader",))
    (row,) = rows_of(rounds[:1])
    assert (row.rate, row.rounds, row.errors) == (0.0, 0, ("no leader",))


def test_row_of_kills_ranks_the_gaps_of_all_rounds() -> None:
    rounds = [
        one("ours", "kill", 0, gaps_ms=(100.0, 900.0)),
        one("ours", "kill", 1, gaps_ms=(200.0,)),
    ]
    (row,) = rows_of(rounds)
    assert (row.kills, row.p50_ms, row.p99_ms) == (3, 200.0, 900.0)


def test_row_of_kills_keeps_those_before_a_failure() -> None:
    rounds = [
        one("ours", "kill", 0, gaps_ms=(100.0, 90_000.0), error="kill 2: no acknowledgement"),
        one("ours", "kill", 1, error="no leader"),
    ]
    (row,) = rows_of(rounds)
    assert (row.kills, row.p99_ms, row.rounds) == (2, 90_000.0, 1)
    assert row.errors == ("kill 2: no acknowledgement", "no leader")
    assert target(targets(rounds), "kill of the leader → next ack, p99 of 2 kills").met is False


def test_rows_keep_the_order_of_the_first_round() -> None:
    rounds = [one("b", "1"), one("a", "1"), one("a", "64", 1), one("b", "1", 1)]
    assert [(row.contender, row.case) for row in rows_of(rounds)] == [
        ("b", "1"),
        ("a", "1"),
        ("a", "64"),
    ]


def test_ratio_is_the_median_of_each_round_with_its_own() -> None:
    # The machine is ten times slower in the second round: medians of the rows would give 5.
    rounds = [
        *(one(*OURS, number, rate=rate) for number, rate in enumerate([200.0, 30.0, 600.0])),
        *(one(*NATS, number, rate=rate) for number, rate in enumerate([100.0, 10.0, 300.0])),
    ]
    assert ratio(rounds, OURS, NATS, lambda each: each.rate) == 2.0


def test_ratio_needs_both_in_one_round() -> None:
    rounds = [one(*OURS, 0, rate=2.0), one(*NATS, 1, rate=1.0)]
    assert ratio(rounds, OURS, NATS, lambda each: each.rate) is None
    failed = [one(*OURS, 0, rate=2.0), one(*NATS, 0, error="no leader")]
    assert ratio(failed, OURS, NATS, lambda each: each.rate) is None
    assert ratio([*rounds, one(*NATS, 0, rate=4.0)], OURS, NATS, lambda each: each.rate) == 0.5


def test_targets_without_figures_are_neither_met_nor_missed() -> None:
    found = targets([one("nats", "64", error="Go is missing")])
    assert len(found) == 13
    assert {(each.measured, each.met) for each in found} == {(None, None)}


@pytest.mark.parametrize(
    ("what", "over", "under", "at_limit", "missed"),
    [
        ("64 outstanding: rate against NATS", ("ours", "64"), ("nats", "64"), 1.0, 0.99),
        (
            "64 outstanding: rate against NATS, synced",
            *(("ours", "64"), ("nats-synced", "64"), 2.5, 2.4),
        ),
        ("512 outstanding: rate against NATS", ("ours", "512"), ("nats", "512"), 1.5, 1.4),
        (
            "batches: rate against RocketMQ",
            *(("ours", "batches"), ("rocketmq", "batches"), 10.0, 9.9),
        ),
        (
            "batches: rate against RocketMQ, `enableBatchPush`",
            *(("ours", "batches"), ("rocketmq-batch-push", "batches"), 5.0, 4.9),
        ),
        (
            "same Java client, 64 outstanding: rate against RocketMQ",
            *(("ours-java", "64"), ("rocketmq", "64"), 4.0, 3.9),
        ),
        ("drain: rate against NATS", ("ours", "drain"), ("nats", "drain"), 2.0, 1.9),
    ],
)
def test_target_of_a_rate(
    what: str, over: tuple[str, str], under: tuple[str, str], at_limit: float, missed: float
) -> None:
    for times, met in ((at_limit, True), (missed, False)):
        found = targets([one(*over, rate=1000.0 * times), one(*under, rate=1000.0)])
        assert (target(found, what).met, target(found, what).measured) == (met, times)
        assert sum(each.measured is not None for each in found) == 1


@pytest.mark.parametrize(
    ("what", "over", "under", "name", "at_limit", "missed"),
    [
        (
            "1 outstanding: p50 against NATS, synced",
            *(("ours", "1"), ("nats-synced", "1"), "p50_ms", 1.0, 1.01),
        ),
        (
            "512 outstanding: brokers' CPU per message against NATS",
            *(("ours", "512"), ("nats", "512"), "broker_cpu_s", 0.7, 0.71),
        ),
    ],
)
def test_target_of_a_cost(
    what: str,
    over: tuple[str, str],
    under: tuple[str, str],
    name: str,
    at_limit: float,
    missed: float,
) -> None:
    for times, met in ((at_limit, True), (missed, False)):
        found = targets([one(*over, **{name: times}), one(*under, **{name: 1.0})])
        assert target(found, what).met is met


def test_target_of_the_java_client_has_rocketmq_above() -> None:
    what = "same Java client, 1 outstanding: p50 of RocketMQ against ours"
    for theirs, met in ((1.3, True), (1.2, False)):
        found = targets([one("rocketmq", "1", p50_ms=theirs), one("ours-java", "1", p50_ms=1.0)])
        assert target(found, what).met is met


def test_target_of_the_spread_is_our_own() -> None:
    found = targets(
        [one(*OURS, number, p50_ms=2.0, p99_ms=p99) for number, p99 in enumerate([4.0, 6.0, 8.0])]
    )
    spread = target(found, "64 outstanding: p99 / p50")
    assert (spread.measured, spread.met) == (3.0, True)


def test_targets_of_kills_count_them() -> None:
    gaps = (150.0,) * 98 + (501.0, 501.0)
    found = targets([one("ours", "kill", gaps_ms=gaps), one("nats", "kill", gaps_ms=(9000.0,))])
    half = target(found, "kill of the leader → next ack, p50 of 100 kills")
    last = target(found, "kill of the leader → next ack, p99 of 100 kills")
    assert (half.measured, half.met) == (0.15, True)
    assert (last.measured, last.met) == (0.501, False)
