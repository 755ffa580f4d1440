"""What is computed from the lines of load programs: gaps, losses, copies, order."""

import pytest

from tests.fail_over.figures import (
    CONSUMED,
    FAILED,
    ORDERED,
    SENT,
    Event,
    Figures,
    Window,
    event_of,
    figures_of,
    is_steady,
    longest_gap_ms,
)

WINDOW = Window(steady_ms=0, fault_ms=1_000, end_ms=2_000)
COUNT = 20
CLEAN = Figures(
    send_gap_ms=100, consume_gap_ms=100, delivery_ms=10, idle_gap_ms=100, acknowledged=COUNT
)


def passing(stream: str = ORDERED) -> list[Event]:
    """Return a message each 100 ms that is acknowledged, and consumed 10 ms later."""
    return [
        Event(kind, stream, number, 100 * number + late)
        for number in range(COUNT)
        for kind, late in ((SENT, 0), (CONSUMED, 10))
    ]


def judged(events: list[Event], stored: list[int] | None = None) -> Figures:
    return figures_of(events, ORDERED, stored or list(range(COUNT)), WINDOW)


def consumed_late(late_ms: dict[int, int]) -> list[Event]:
    return [
        event._replace(at_ms=event.at_ms + late_ms.get(event.number, 0) * (event.kind == CONSUMED))
        for event in passing()
    ]


def test_event_of_reads_a_line() -> None:
    line = {"kind": "failed", "key": "plain-17", "at_ms": 9, "reason": "timeout"}
    assert event_of(line) == Event(FAILED, "plain", 17, 9, "timeout")


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        ([], 100),  # none at all: as long as the window
        ([190, 110, 90], 80),  # in any order
        ([40, 150], 110),  # it began before the window
        ([100, 120], 80),  # it lasts until the end
        ([100, 150, 199, 300], 50),  # what comes behind the window counts for nothing
    ],
)
def test_longest_gap_reaches_into_the_window(times: list[int], gap: int) -> None:
    assert longest_gap_ms(times, 100, 200) == gap


def test_figures_of_a_run_without_fault_are_clean() -> None:
    assert judged(passing()) == CLEAN
    assert judged([*passing(), Event(FAILED, "plain", 1, 1_500)]) == CLEAN


def test_figures_show_gaps_before_and_after_the_fault() -> None:
    events = [
        event
        for event in passing()
        if not 300 <= event.at_ms < 500
        and not (event.kind == SENT and 1_100 <= event.at_ms < 1_500)
        and not (event.kind == CONSUMED and 1_200 <= event.at_ms < 1_900)
    ]
    found = judged(events)
    assert (found.idle_gap_ms, found.send_gap_ms, found.consume_gap_ms) == (300, 500, 800)


def test_figures_count_errors_by_reason() -> None:
    reasons = ["not served", "after 3012 ms", "not served", "after 3004 ms"]
    events = [Event(FAILED, ORDERED, 50 + place, 1_500, text) for place, text in enumerate(reasons)]
    found = judged(passing() + events)
    assert (found.errors, found.reasons) == (4, {"not served": 2, "after # ms": 2})


@pytest.mark.parametrize(
    ("stored", "name", "count"),
    [
        ([number for number in range(COUNT) if number not in (4, 9)], "lost", 2),
        ([*range(COUNT), 19, 3], "twice", 2),
        ([0, 1, 4, 2, 3, *range(5, COUNT)], "reordered", 2),
    ],
)
def test_figures_count_what_the_topic_shows(stored: list[int], name: str, count: int) -> None:
    found = judged(passing(), stored)
    assert {each: getattr(found, each) for each in ("lost", "twice", "reordered")} == {
        each: count * (each == name) for each in ("lost", "twice", "reordered")
    }


def test_figures_count_first_consumptions_out_of_order() -> None:
    assert judged(consumed_late({5: 150})).reordered == 1


def test_figures_take_repeated_deliveries_for_no_broken_order() -> None:
    assert judged([*passing(), Event(CONSUMED, ORDERED, 5, 1_990)]).reordered == 0


def test_figures_take_failed_sends_for_no_broken_order() -> None:
    events = [event for event in passing() if event.number != 3]
    assert judged(events, [0, 1, 2, 4, 3, *range(5, COUNT)]).reordered == 0


def test_figures_of_the_plain_topic_know_no_order() -> None:
    stored = [*range(0, COUNT, 2), *range(1, COUNT, 2)]
    assert figures_of(passing("plain"), "plain", stored, WINDOW).reordered == 0


def test_figures_show_the_latest_delivery_after_the_fault() -> None:
    found = judged(consumed_late({3: 500, 8: 600}))  # the first one came before it
    assert (found.delivery_ms, found.unconsumed) == (610, 0)


def test_figures_count_what_is_stored_and_never_came() -> None:
    events = [event for event in passing() if (event.kind, event.number) != (CONSUMED, 7)]
    assert (judged(events).unconsumed, judged(events).lost) == (1, 0)


def test_is_steady_needs_every_stream() -> None:
    both = passing() + passing("plain")
    assert is_steady(both, 1_000, 2_000, 150)
    assert not is_steady(both, 1_000, 2_000, 100)
    assert not is_steady(passing(), 1_000, 2_000, 150)
    late = [event for event in both if event.kind != CONSUMED or event.at_ms < 1_800]
    assert not is_steady(late, 1_000, 2_000, 150)
