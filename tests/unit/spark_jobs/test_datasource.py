"""What the data source decides before it asks a broker: options, ranges, push-down, messages."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageBlock
from dledger.commitlog.record import encode_record
from dledger.spark_jobs.datasource.options import (
    COLUMNS,
    LATEST,
    Bounds,
    OptionError,
    Options,
    QueueRange,
    advance,
    between,
    chosen,
    cut,
    parse_options,
    parse_queue_name,
    queue_name,
)
from dledger.spark_jobs.datasource.source import batch_of

GIVEN = {"namesrv": "h:1", "topic": "T"}
Q0 = QueueRange("T", "b", 0, 10, 100)
Q1 = QueueRange("T", "b", 1, 0, 50)
offsets = st.dictionaries(
    st.sampled_from([queue_name("T", "b", number) for number in range(6)]),
    st.integers(0, 1000),
    max_size=6,
)


def test_options_are_taken_in_any_case() -> None:
    options = parse_options(
        {
            **GIVEN,
            "Topic": "T, U",
            "maxMessagesPerTrigger": "7",
            "startingOffsets": '{"T/b/0": 12}',
            "endingOffsets": "latest",
            "columns": "body, queue_id",
            "failOnDataLoss": "false",
        }
    )
    assert options.topics == ("T", "U")
    assert options.trigger_messages == 7
    assert options.starting == {"T/b/0": 12}
    assert options.ending == LATEST
    assert options.schema == "body binary, queue_id int"
    assert not options.fail_on_data_loss
    assert parse_options(GIVEN).fail_on_data_loss
    assert not parse_options(GIVEN).filter_pushdown
    assert len(parse_options(GIVEN).columns) == len(COLUMNS)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"topic": "T"}, "either namesrv"),
        ({**GIVEN, "path": "/x"}, "either namesrv"),
        ({"namesrv": "h:1"}, "topic is missing"),
        ({**GIVEN, "startingOffset": "0"}, "startingoffset is not known"),
        ({**GIVEN, "startingOffsets": "0"}, "startingoffsets is '0'"),
        ({**GIVEN, "startingOffsets": '{"T/0": 1}'}, "startingoffsets"),
        ({**GIVEN, "maxMessagesPerTrigger": "0"}, "above 0"),
        ({**GIVEN, "columns": "key"}, "column key is not known"),
        ({**GIVEN, "failOnDataLoss": "no"}, "true or false"),
        ({**GIVEN, "filterPushdown": "1"}, "true or false"),
    ],
)
def test_a_bad_option_is_named(given: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        parse_options(given)


def test_a_write_names_one_topic_or_none() -> None:
    assert parse_options({"namesrv": "h:1"}, use="write").topics == ()
    with pytest.raises(OptionError, match="at most one topic"):
        parse_options({"namesrv": "h:1", "topic": "T,U"}, use="write")


def test_a_queue_is_named_with_its_broker() -> None:
    assert parse_queue_name(queue_name("%RETRY%g", "b-1", 3)) == ("%RETRY%g", "b-1", 3)


def test_ranges_within_stored_offsets_cut_into_pieces() -> None:
    assert chosen([Q1, Q0], "earliest", "latest") == [Q0, Q1]
    assert chosen([Q0], {"T/b/0": 5}, {"T/b/0": 2000}) == [Q0]
    assert chosen([Q0, Q1], {"T/b/0": 90}, {"T/b/1": 20}) == [
        replace(Q0, begin=90),
        replace(Q1, end=20),
    ]
    pieces = cut([Q0, Q1, replace(Q0, begin=100)], 40)
    assert [(p.queue_id, p.begin, p.end) for p in pieces] == [
        (0, 10, 50), (0, 50, 90), (0, 90, 100), (1, 0, 40), (1, 40, 50),
    ]  # fmt: skip


@given(start=offsets, more=offsets, limit=st.integers(1, 500))
def test_stream_advances_within_limit_over_all_queues(
    start: dict[str, int], more: dict[str, int], limit: int
) -> None:
    latest = {name: start.get(name, 0) + more.get(name, 0) for name in {*start, *more}}
    end = advance(start, latest, limit)
    assert end == advance(dict(reversed(start.items())), dict(reversed(latest.items())), limit)
    assert end.keys() == latest.keys()
    taken = {name: end[name] - start.get(name, 0) for name in end}
    assert all(0 <= taken[name] <= latest[name] - start.get(name, 0) for name in end)
    left = sum(latest.values()) - sum(start.get(name, 0) for name in latest)
    assert sum(taken.values()) == min(limit, left)
    waiting = [name for name in latest if latest[name] > start.get(name, 0)]
    if limit >= len(waiting):
        assert all(taken[name] > 0 for name in waiting)
    ranges = between(start, end)
    assert sum(one.end - one.begin for one in ranges) == sum(taken.values())


def test_terms_on_topic_queue_and_offset_are_taken_exactly() -> None:
    bounds = Bounds()
    assert bounds.take("In", "topic", ("T", "U"))
    assert bounds.take("EqualTo", "topic", "T")
    assert bounds.take("IsNotNull", "queue_offset", None)
    assert not bounds.take("IsNotNull", "body", None)
    assert bounds.take("GreaterThan", "queue_offset", 20)
    assert bounds.take("LessThanOrEqual", "queue_offset", 30)
    assert bounds.take("GreaterThanOrEqual", "queue_id", 0)
    assert bounds.take("LessThan", "queue_id", 1)
    assert bounds.narrow([Q0, Q1, replace(Q0, topic="U")]) == [replace(Q0, begin=21, end=31)]
    assert Bounds().narrow([Q0]) == [Q0]


def test_terms_that_are_not_understood_are_left_to_spark() -> None:
    bounds = Bounds()
    assert not bounds.take("EqualTo", "body", b"x")
    assert not bounds.take("StringStartsWith", "topic", "T")
    assert not bounds.take("EqualTo", "topic", None)
    assert not bounds.take("In", "queue_offset", (1, 2))
    assert not bounds.take("GreaterThan", "topic", "T")
    assert bounds == Bounds()


def test_store_time_terms_narrow_and_stay_with_spark() -> None:
    bounds = Bounds()
    low = datetime(2026, 1, 1, tzinfo=UTC)
    high = datetime(2026, 1, 2, tzinfo=UTC)
    assert not bounds.take("GreaterThanOrEqual", "store_timestamp", low)
    assert not bounds.take("LessThan", "store_timestamp", high)
    assert bounds.has_times
    assert bounds.from_ms == 1_767_225_600_000 - 1
    assert bounds.until_ms == 1_767_312_000_000 + 2


def test_a_message_becomes_a_row() -> None:
    record = encode_record(
        topic="T",
        queue_id=2,
        body=b"body",
        properties=b"UNIQ_KEY\x01id\x02TAGS\x01a\x02KEYS\x01k1 k2\x02colour\x01red\x02",
        queue_offset=9,
        born_timestamp_ms=1_700_000_000_123,
        store_timestamp_ms=1_700_000_000_456,
    )
    (row,) = batch_of(MessageBlock(record, "b"), tuple(COLUMNS)).to_pylist()
    assert row["topic"] == "T"
    assert (row["broker"], row["queue_id"], row["queue_offset"]) == ("b", 2, 9)
    assert row["born_timestamp"] == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    assert row["store_timestamp"] == datetime(2023, 11, 14, 22, 13, 20, 456_000, UTC)
    assert (row["message_id"], row["keys"], row["tags"]) == ("id", "k1 k2", "a")
    assert dict(row["properties"])["colour"] == "red"
    assert row["body"] == b"body"
    assert batch_of([], ("body",)).num_rows == 0


def test_a_row_becomes_a_message() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")
    from dledger.spark_jobs.datasource.network import check_columns, message_of

    row = {
        "body": "text",
        "tags": "a",
        "keys": "k1",
        "properties": [("colour", "red")],
        "idempotent_key": "row-7",
    }
    assert message_of(row, "T") == Message(
        "T",
        b"text",
        tags="a",
        keys="k1 row-7",
        properties={"colour": "red", "IDEMPOTENT_KEY": "row-7"},
    )
    assert message_of({"topic": "U", "body": b"x", "tags": None}, "T") == Message("U", b"x")
    with pytest.raises(OptionError, match="body is missing"):
        check_columns(Options(topics=("T",)), ("tags",))
    with pytest.raises(OptionError, match="name the topic"):
        check_columns(Options(), ("body",))
    with pytest.raises(OptionError, match="column value is no part"):
        check_columns(Options(topics=("T",)), ("body", "value"))
