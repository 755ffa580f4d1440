"""What a mirror decides: pairs, what is copied, where each queue stands, offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.errors import ConfigError
from dledger.mirror.plan import (
    Begin,
    Bounds,
    Commit,
    Copy,
    Level,
    Selection,
    Stopped,
    configs_to_put,
    follows,
    judge,
    offsets_to_commit,
    pair_brokers,
)
from dledger.state.topics import SET_ASIDE_TOPIC

offsets = st.integers(0, 50)
bounds = st.tuples(offsets, offsets).map(lambda pair: Bounds(min(pair), max(pair)))


def test_pairs_are_those_of_one_name() -> None:
    assert pair_brokers(["b", "a"], ["a", "b", "c"], {}) == {"a": "a", "b": "b"}


def test_last_group_of_each_side_is_a_pair() -> None:
    assert pair_brokers(["x"], ["y"], {}) == {"x": "y"}
    assert pair_brokers(["a", "x"], ["a", "y"], {}) == {"a": "a", "x": "y"}


def test_given_pairs_come_first() -> None:
    assert pair_brokers(["a", "b"], ["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("source", "target", "given_pairs", "words"),
    [
        (["a", "b"], ["c", "d"], {}, "a, b are copied to"),
        (["a", "b"], ["c"], {}, "a, b are copied to"),
        (["a"], [], {}, "the target has none"),
        (["a", "b"], ["c"], {"a": "c", "b": "c"}, "cannot be copied to one"),
        (["a"], ["c"], {"z": "c"}, "z at the source"),
        (["a"], ["c"], {"a": "z"}, "z at the target"),
    ],
)
def test_groups_without_a_counterpart_are_refused(
    source: list[str], target: list[str], given_pairs: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pair_brokers(source, target, given_pairs)


@pytest.mark.parametrize(
    "name",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_DLEDGER_STATE",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "rmq_sys_wheel_timer",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        SET_ASIDE_TOPIC,
        "TBW102",
    ],
)
def test_topics_of_services_are_not_copied(name: str) -> None:
    assert not Selection().has_topic(name)


def test_patterns_select_topics_and_groups() -> None:
    chosen = Selection("orders*, bills", "billing")
    assert [chosen.has_topic(name) for name in ("orders.eu", "bills", "bills2")] == [
        True,
        True,
        False,
    ]
    assert chosen.has_topic("%RETRY%billing")
    assert chosen.has_topic("%DLQ%billing")
    assert not chosen.has_topic("%RETRY%shipping")


def test_configs_that_differ_are_put() -> None:
    assert configs_to_put({"b": 1, "a": 2, "c": 3}, {"a": 2, "b": 9, "z": 5}) == [1, 3]


@pytest.mark.parametrize(
    ("source", "target", "step"),
    [
        ((0, 0), (0, 0), Level()),
        ((0, 5), (0, 5), Level()),
        ((3, 5), (0, 5), Level()),
        ((0, 5), (0, 0), Copy(0, 5)),
        ((2, 5), (0, 2), Copy(2, 5)),
        ((2, 5), (0, 0), Begin(2, 5)),
        ((5, 5), (0, 0), Begin(5, 5)),
    ],
)
def test_queue_is_copied_from_where_the_target_ends(
    source: tuple[int, int], target: tuple[int, int], step: object
) -> None:
    assert judge(Bounds(*source), Bounds(*target)) == step


def test_what_the_source_lost_stops_the_queue() -> None:
    step = judge(Bounds(8, 9), Bounds(0, 5))
    assert isinstance(step, Stopped)
    assert "offsets 5 to 7" in step.why
    assert "delete the topic at the target" in step.why
    assert "begin at offset 8" in step.why


def test_what_only_the_target_has_stops_the_queue() -> None:
    step = judge(Bounds(0, 5), Bounds(0, 7))
    assert isinstance(step, Stopped)
    assert "offsets 5 to 6" in step.why
    assert "let nothing but the mirror write" in step.why


@given(bounds, bounds)
def test_judge_leaves_no_gap_and_appends_at_the_end(source: Bounds, target: Bounds) -> None:
    step = judge(source, target)
    match step:
        case Copy(first, end):
            assert first == target.end
            assert source.begin <= first < end == source.end
        case Begin(first, end):
            assert target.end == 0 < first == source.begin
            assert end == source.end
        case Level():
            assert target.end == source.end
        case Stopped():
            assert target.end > source.end or 0 < target.end < source.begin


@given(offsets, st.lists(offsets, max_size=6))
def test_follows_counts_up_to_the_first_hole(first: int, found: list[int]) -> None:
    count = follows(first, found)
    assert found[:count] == list(range(first, first + count))
    assert count == len(found) or found[count] != first + count


tables = st.dictionaries(
    st.tuples(st.sampled_from(["g", "h"]), st.sampled_from(["T", "U"])),
    st.dictionaries(st.integers(0, 2), offsets, max_size=3),
    max_size=4,
)
ends = st.dictionaries(
    st.tuples(st.sampled_from(["T", "U"]), st.integers(0, 2)), offsets, max_size=6
)


@given(tables, tables, ends)
def test_committed_offsets_point_at_what_is_there(
    source: dict[tuple[str, str], dict[int, int]],
    target: dict[tuple[str, str], dict[int, int]],
    copied: dict[tuple[str, int], int],
) -> None:
    commits = offsets_to_commit(source, target, copied, Selection(groups="g"))
    for group, topic, queue_id, offset in commits:
        assert group == "g"
        assert offset <= copied[topic, queue_id], "it points behind the copied messages"
        assert offset <= source[group, topic][queue_id]
        assert offset > target.get((group, topic), {}).get(queue_id, -1), "it moves back"
    after = {key: dict(offsets_there) for key, offsets_there in target.items()}
    for group, topic, queue_id, offset in commits:
        after.setdefault((group, topic), {})[queue_id] = offset
    assert offsets_to_commit(source, after, copied, Selection(groups="g")) == []


def test_offset_waits_for_its_messages() -> None:
    source = {("g", "T"): {0: 9}}
    assert offsets_to_commit(source, {}, {("T", 0): 4}, Selection()) == [Commit("g", "T", 0, 4)]
    assert offsets_to_commit(source, {}, {}, Selection()) == []
