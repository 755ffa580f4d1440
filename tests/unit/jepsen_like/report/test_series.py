"""The numbers behind the pictures, worked out by hand."""

import math

import numpy as np
import pytest

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Event,
    F,
    Operation,
    Outcome,
    Sample,
)
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.report.canvas import LOOKS, look_of
from dledger.jepsen_like.report.series import (
    BUCKETS_MAX,
    NS,
    Fault,
    Leadership,
    Served,
    Span,
    availability_of,
    bands_of,
    columns_of,
    counts_of,
    down_of,
    faults_of,
    kinds_of,
    lag_of,
    latency_of,
    leaderships_of,
    percentile,
    rates_of,
    skipped_of,
    span_of,
)
from dledger.jepsen_like.report.witness_picture import ORDER_OPERATIONS_MAX, Statement, orders_of

MS = 1_000_000
BEGIN = 5 * NS


def op(
    op_id: int, at_s: float, took_ms: float | None, f: F = F.SEND, outcome: Outcome = Outcome.OK
) -> Operation:
    call_ns = BEGIN + round(at_s * NS)
    ret_ns = NEVER if took_ms is None else call_ns + round(took_ms * MS)
    return Operation(op_id, op_id, 0, -1, f, outcome, call_ns, ret_ns, "t", 0)


TINY = [
    op(0, 0.0, 4),
    op(1, 0.1, 2),
    op(2, 0.2, 8),
    op(3, 0.3, 1, F.PULL),
    op(4, 1.0, None, outcome=Outcome.INFO),
    op(5, 1.5, 30, outcome=Outcome.FAIL),
    op(6, 2.5, 1000),
    op(7, 4.0, 5, F.PULL),
]
"""Seconds: 0 served; 1 and 2 not, a send hangs from 2.5 to 3.5; 3 served; 4 no client sends."""


def test_the_span_reaches_from_the_first_call_to_the_last_return() -> None:
    span = span_of(columns_of(TINY))
    assert (span.begin_ns, span.end_ns) == (BEGIN, BEGIN + 4 * NS + 5 * MS)
    assert (span.bucket_s, span.buckets) == (1, 5)
    later = span_of(columns_of(TINY), [Event(BEGIN - NS, BEGIN + 9 * NS, "kill")])
    assert (later.begin_ns, later.end_ns) == (BEGIN - NS, BEGIN + 9 * NS)


@pytest.mark.parametrize(("seconds", "bucket_s"), [(899, 1), (900, 2), (1800, 5), (86_400, 120)])
def test_long_run_has_no_more_buckets_than_a_picture_holds(seconds: int, bucket_s: int) -> None:
    span = span_of(columns_of([op(0, 0, 1), op(1, seconds, 0)]))
    assert span.bucket_s == bucket_s
    assert span.buckets <= BUCKETS_MAX


def test_a_senseless_stamp_costs_no_memory() -> None:
    columns = columns_of([op(0, 0, 1), op(1, 1e9, 0)])
    span = span_of(columns)
    assert span.buckets <= BUCKETS_MAX
    assert availability_of(columns, span).served_s == 2


def test_counts_by_name_and_outcome() -> None:
    assert counts_of(columns_of(TINY)) == {
        "send": {"ok": 4, "info": 1, "fail": 1},
        "pull": {"ok": 2, "info": 0, "fail": 0},
    }
    assert counts_of(columns_of([])) == {}


def test_latency_of_acknowledged_operations_by_call_second() -> None:
    columns = columns_of(TINY)
    latency = latency_of(columns, span_of(columns))
    nan = math.nan
    np.testing.assert_array_equal(latency.at_s, [0, 1, 2, 3, 4])
    np.testing.assert_allclose(latency.p50_ms, [2, nan, 1000, nan, 5])
    np.testing.assert_allclose(latency.p99_ms, [8, nan, 1000, nan, 5])
    np.testing.assert_allclose(latency.max_ms, [8, nan, 1000, nan, 5])


def test_p99_of_two_hundred_leaves_out_the_two_slowest() -> None:
    columns = columns_of([op(at, at / 1000, at + 1) for at in range(200)])
    latency = latency_of(columns, span_of(columns))
    assert latency.p50_ms[0] == pytest.approx(100)
    assert latency.p99_ms[0] == pytest.approx(198)
    assert latency.max_ms[0] == pytest.approx(200)


def test_rates_are_per_second_also_in_wider_buckets() -> None:
    columns = columns_of(TINY)
    span = span_of(columns)
    rates = rates_of(columns, span)
    np.testing.assert_array_equal(rates.ok, [4, 0, 1, 0, 1])
    np.testing.assert_array_equal(rates.info, [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(rates.fail, [0, 1, 0, 0, 0])
    wide = rates_of(columns, Span(span.begin_ns, span.end_ns, 5))
    np.testing.assert_allclose(wide.ok, [6 / 5])


def test_a_second_is_served_when_a_send_was_acknowledged_in_it() -> None:
    columns = columns_of(TINY)
    availability = availability_of(columns, span_of(columns))
    assert availability.spells == (
        (Served.YES, 0, 1),
        (Served.NO, 1, 3),
        (Served.YES, 3, 4),
        (Served.IDLE, 4, 5),
    )
    assert (availability.served_s, availability.refused_s) == (2, 2)
    assert availability.share == 0.5


def test_clients_without_an_answer_count_as_refused() -> None:
    waits = op(0, 1.0, None, outcome=Outcome.INFO)
    columns = columns_of([op(1, 0.0, 1), waits, op(2, 20.0, 1)])
    idle = availability_of(columns, span_of(columns))
    assert idle.spells == (
        (Served.YES, 0, 1),
        (Served.NO, 1, 7),
        (Served.IDLE, 7, 20),
        (Served.YES, 20, 21),
    )
    columns = columns_of([op(1, 0.0, 1), waits, op(2, 3.0, 1), op(3, 20.0, 1)])
    served = availability_of(columns, span_of(columns))
    assert served.spells == (
        (Served.YES, 0, 1),
        (Served.NO, 1, 3),
        (Served.YES, 3, 4),
        (Served.IDLE, 4, 20),
        (Served.YES, 20, 21),
    )


def test_no_sends_is_no_refusal() -> None:
    columns = columns_of([op(0, 0, 1, F.PULL)])
    availability = availability_of(columns, span_of(columns))
    assert availability.spells == ((Served.IDLE, 0, 1),)
    assert math.isnan(availability.share)


def test_nearest_rank() -> None:
    assert [percentile([30.0, 10.0, 20.0], at) for at in (1, 50, 99)] == [10, 20, 30]


# -- faults ----------------------------------------------------------------------------------

SPAN = Span(0, 400 * NS, 1)


def event(at_s: float, end_s: float, kind: str, node: str = "", detail: str = "") -> Event:
    return Event(round(at_s * NS), round(end_s * NS), kind, "", node, detail)


EVENTS = [
    event(10, 20, "kill", "n1"),
    event(15, 30, "kill", "n2"),
    event(50, 50, "reset", "n1"),
    event(60, 61, "healed"),
    event(70, 70, "wipe", "n1", "skipped: too few are left"),
    event(80, 90, "meteor", "n3"),
]


def test_faults_from_plan_run_and_actions() -> None:
    assert [fault.kind for fault in faults_of(EVENTS, SPAN)] == ["kill", "kill", "reset"]
    reported = faults_of(EVENTS, SPAN, {"meteor": 1})
    assert reported[-1] == Fault("meteor", 80, 90, "n3")
    assert kinds_of(reported) == ["kill", "reset", "meteor"]
    assert [(s.kind, s.reason, s.count) for s in skipped_of(EVENTS)] == [
        ("wipe", "too few are left", 1)
    ]


def test_touching_bands_join_and_an_instant_is_visible() -> None:
    bands = bands_of(faults_of(EVENTS, SPAN), SPAN)
    assert bands == {"kill": [(10, 30)], "reset": [(50, 51)]}


def test_every_kind_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == {kind.value for kind in Kind}
    assert len(set(LOOKS.values())) == len(Kind)
    assert look_of("meteor") == look_of("meteor")
    assert look_of("meteor") not in LOOKS.values()


# -- roles and samples -----------------------------------------------------------------------


def test_leadership_ends_by_event_process_end_or_run_end() -> None:
    events = [
        event(1, 1, "role", "n1", "leader term 7"),
        event(40, 45, "kill", "n1"),
        event(42, 42, "role", "n2", "leader term 8"),
        event(60, 60, "role", "n3", "candidate term 9"),
        event(61, 61, "role", "n3", "leader term 9"),
        event(63, 63, "role", "n2", "follower term 9"),
    ]
    assert leaderships_of(events, (), SPAN) == [
        Leadership("n1", 7, 1, 40),
        Leadership("n2", 8, 42, 63),
        Leadership("n3", 9, 61, 400),
    ]


def sample(at_s: float, node: str, role: str, term: int, last: int, up: bool = True) -> Sample:
    return Sample(round(at_s * NS), node, role, term, last, last, up)


SAMPLES = [
    sample(0.0, "n1", "leader", 3, 100),
    sample(0.1, "n2", "follower", 3, 90),
    sample(0.5, "n1", "leader", 3, 200),
    sample(0.6, "n2", "follower", 3, 120),
    sample(1.0, "n2", "leader", 4, 300),
    sample(1.1, "n1", "leader", 3, 999),
    sample(1.2, "n3", "follower", 4, 301),
    sample(2.0, "n1", "follower", 4, 0, up=False),
    sample(3.0, "n1", "follower", 4, 299),
    sample(9.0, "n3", "follower", 4, 5),
]


def test_lag_is_measured_against_the_leader_of_the_newest_term() -> None:
    lag = lag_of(SAMPLES, Span(0, 9 * NS, 1))
    nan = math.nan
    np.testing.assert_array_equal(lag["n2"], [80, *[nan] * 9])
    np.testing.assert_array_equal(lag["n3"], [nan, 0, *[nan] * 8])
    np.testing.assert_array_equal(lag["n1"], [nan, nan, nan, 1, *[nan] * 6])
    assert lag_of([], SPAN) == {}


def test_without_events_samples_show_leader_and_down_nodes() -> None:
    span = Span(0, 9 * NS, 1)
    assert leaderships_of((), SAMPLES, span) == [
        Leadership("n1", 3, 0, 2),
        Leadership("n2", 4, 1, 9),
    ]
    assert down_of(SAMPLES, span) == {"n1": [(2, 3)]}


# -- order in a queue ------------------------------------------------------------------------


def test_order_picture_has_witnesses_and_neighbours() -> None:
    operations = [op(at, at, 100) for at in range(500)]
    for at, each in enumerate(operations):
        each.off = at
    stale = op(500, 300.5, 100, F.MAX_OFFSET)
    stale.max_off = 250
    other = op(501, 300.5, 100)
    other.topic, other.off = "elsewhere", 3
    violation = Violation("stale read", "t/0", "…", (10, 500))
    lost = Violation("lost", "group", "…", (10,))
    (order,) = orders_of([*operations, stale, other], [lost, violation])
    assert (order.queue, order.violation) == ("t/0", violation)
    assert len(order.marks) == ORDER_OPERATIONS_MAX
    witnesses = [mark for mark in order.marks if mark.is_witness]
    assert [(m.op.op_id, m.statement, m.low, m.high) for m in witnesses] == [
        (10, Statement.SENT, 10, 10),
        (500, Statement.END, 250, 250),
    ]
    rest = {mark.op.op_id for mark in order.marks if not mark.is_witness}
    assert {9, 11, 300, 301} <= rest
    assert not rest & {100, 200, 400}


def test_what_cannot_be_drawn_makes_no_picture() -> None:
    unknown = op(0, 0, None, outcome=Outcome.INFO)
    assert unknown.off == NOTHING
    assert orders_of([unknown], [Violation("lost", "t/0", "…", (0,))]) == []
