"""Lines of requests that wait, and when groups are to be looked at again in topics."""

import random

import pytest

from dledger.services.pop_decision import Receive
from dledger.services.pop_lines import DueTimes, Pair, PopAsk, PopLines


@pytest.mark.parametrize("seed", range(3))
def test_due_times_are_those_of_a_plain_table(seed: int) -> None:
    rng = random.Random(seed)
    due, table, now_ms = DueTimes(), dict[Pair, int](), 0
    for _ in range(3_000):
        pair = (f"g{rng.randrange(5)}", f"t{rng.randrange(5)}")
        at_ms = now_ms + rng.randrange(200)
        assert due.note(pair, at_ms) is (at_ms < table.get(pair, 1 << 62))
        table[pair] = min(at_ms, table.get(pair, at_ms))
        assert due.next_ms == min(table.values())
        if rng.random() < 0.2:
            now_ms += rng.randrange(60)
            fired = due.take(now_ms)
            assert fired == sorted(fired, key=lambda each: table[each])
            assert set(fired) == {each for each, at in table.items() if at <= now_ms}
            for each in fired:
                del table[each]
        assert len(due) == len(table)
        assert len(due._heap) <= 2 * len(table) + 65
    due.clear()
    assert (due.next_ms, due.take(1 << 62)) == (None, [])


def ask(group: str, topic: str, queue_id: int, owner: object = None) -> PopAsk:
    receive = Receive(group=group, topic=topic, queue_ids=(), wanted=1, max_bytes=1, invisible_ms=1)
    return PopAsk(
        on_done=lambda _ask, _error: None, receive=receive, queue_id=queue_id, owner=owner
    )


def test_lines_are_found_by_group_and_topic() -> None:
    lines = PopLines()
    places = (("g", "T", -1), ("g", "T", -1), ("g", "T", 3), ("h", "T", -1), ("g", "U", -1))
    held = [ask(*place) for place in places]
    list(map(lines.hold, held))
    assert lines.of_pair(("g", "T")) == [("g", "T", -1, False), ("g", "T", 3, False)]
    assert len(lines.of_topic("T")) == 3
    lines.release(held[0])
    assert len(lines.of_pair(("g", "T"))) == 2, "another one stands in the line"
    for each in held[1:]:
        lines.release(each)
    assert (lines.of_pair(("g", "T")), lines.of_topic("T"), lines.all()) == ([], [], [])
    assert not any((lines._of_pair, lines._of_topic, lines._of_owner))


def test_requests_of_a_connection_are_found_until_they_end() -> None:
    lines, first, second = PopLines(), object(), object()
    held = [ask("g", "T", -1, first), ask("g", "U", -1, first), ask("g", "T", -1, second)]
    for each in held:
        lines.hold(each)
    lines.release(held[0])
    lines.release(held[0])
    assert (lines.count, lines.first(("g", "T", -1, False))) == (2, held[2])
    lines.release_owner(first)
    assert lines.all() == [held[2]]
