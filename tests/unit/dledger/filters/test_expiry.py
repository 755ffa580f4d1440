"""When a message's time is over, from its properties, its store time and the time alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.java_hash import raw_tags_code
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import encode_record, record_properties, stored_ms_of
from dledger.filters.expiry import MAX_EXPIRE_MS, LivingFilter, expire_after_ms, expires, is_expired
from dledger.filters.property_filter import Expression


def record(stored_ms: int = 1000, **properties: str) -> memoryview:
    return memoryview(
        encode_record(
            topic="T",
            queue_id=0,
            body=b"body",
            properties=encode_properties(properties),
            store_timestamp_ms=stored_ms,
        )
    )


def admits(living: LivingFilter, stored: memoryview) -> bool:
    return living.admits(stored, record_properties(stored))


@given(st.one_of(st.none(), st.integers(1, 10_000)), st.integers(0, 10_000), st.integers(0, 30_000))
def test_message_expires_so_long_after_it_was_stored(
    after_ms: int | None, stored_ms: int, now_ms: int
) -> None:
    properties = {"TAGS": "a", "TTL": "1"}
    if after_ms is not None:
        properties["EXPIRE_AFTER_MS"] = str(after_ms)
    stored = record(stored_ms, **properties)
    expired = after_ms is not None and now_ms >= stored_ms + after_ms
    assert stored_ms_of(stored) == stored_ms
    assert is_expired(record_properties(stored), stored_ms, now_ms) == expired
    living = LivingFilter(lambda: now_ms)
    assert admits(living, stored) == (not expired)
    assert living.take_passed_over() == expired
    assert living.take_passed_over() == 0


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "1 ", str(MAX_EXPIRE_MS + 1), "9" * 400])
def test_time_that_cannot_be_read_is_an_error(value: str) -> None:
    properties = encode_properties({"EXPIRE_AFTER_MS": value})
    with pytest.raises(ValueError, match="a number of milliseconds"):
        expire_after_ms(properties)
    assert not is_expired(properties, 0, 1 << 60)


def test_time_is_read_whole() -> None:
    assert expire_after_ms(encode_properties({"EXPIRE_AFTER_MS": "250"})) == 250
    assert expire_after_ms(encode_properties({"MY_EXPIRE_AFTER_MS": "250"})) is None
    assert expire_after_ms(b"") is None


def test_topic_has_expiring_messages_by_its_attribute() -> None:
    assert expires({"message.expires": "true"})
    assert not expires({"message.expires": "false"})
    assert not expires({})


def test_only_wanted_messages_count_as_expired() -> None:
    living = LivingFilter(lambda: 5000, [raw_tags_code(b"a")])
    assert not admits(living, record(TAGS="b", EXPIRE_AFTER_MS="1"))
    assert living.passed_over == 0
    assert not admits(living, record(TAGS="a", EXPIRE_AFTER_MS="1"))
    assert living.passed_over == 1
    assert admits(living, record(TAGS="a", EXPIRE_AFTER_MS="4001"))
    assert not admits(living, record(EXPIRE_AFTER_MS="4001")), "it has no tag"


def test_living_messages_are_judged_by_the_other_filter() -> None:
    living = LivingFilter(lambda: 5000, None, Expression("price > 3"))
    assert living.cost == Expression("price > 3").cost + 1
    assert admits(living, record(price="4"))
    assert not admits(living, record(price="3"))
    assert not admits(living, record(price="4", EXPIRE_AFTER_MS="1"))
    assert living.passed_over == 1
