"""Records, properties and batch items survive the way there and back."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.message_id import decode_offset_message_id, encode_offset_message_id
from dledger.commitlog.properties import decode_properties, encode_properties, get_property
from dledger.commitlog.record import (
    checked_body,
    decode_record,
    encode_record,
    pack_host,
    record_properties,
    unpack_host,
)
from dledger.commitlog.record_batch import BatchItem, decode_batch, encode_batch
from tests.property.strategies_records import (
    I64,
    hosts,
    property_maps,
    raw_properties,
    record_arguments,
)


@given(record_arguments, hosts)
def test_a_record_decodes_to_what_was_encoded(arguments: dict[str, Any], store_host: bytes) -> None:
    raw = encode_record(**arguments, store_host=store_host)
    record = decode_record(b"head" + raw + b"tail", 4)
    assert record.size == len(raw)
    assert record.topic == arguments["topic"]
    assert record.body == arguments["body"]
    assert record.properties == record_properties(raw) == arguments["properties"]
    assert checked_body(b"head" + raw, 4) == (record.body, len(raw))
    assert record.born_host == unpack_host(arguments["born_host"])
    assert record.store_host == unpack_host(store_host)
    assert (
        record.queue_id,
        record.flag,
        record.queue_offset,
        record.phy_offset,
        record.born_timestamp_ms,
        record.store_timestamp_ms,
        record.reconsume_times,
        record.prepared_transaction_offset,
    ) == (
        arguments["queue_id"],
        arguments["flag"],
        arguments["queue_offset"],
        arguments["phy_offset"],
        arguments["born_timestamp_ms"],
        arguments["store_timestamp_ms"],
        arguments["reconsume_times"],
        arguments["prepared_transaction_offset"],
    )
    assert record.sys_flag & ~48 == arguments["sys_flag"]


@given(hosts)
def test_an_address_packs_to_the_bytes_it_came_from(packed: bytes) -> None:
    host, port = unpack_host(packed)
    assert pack_host(host, port) == packed


@given(property_maps())
def test_properties_decode_to_what_was_encoded(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@given(raw_properties(), st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"X"]))
def test_one_property_is_found_as_decoding_all_finds_it(raw: bytes, key: bytes) -> None:
    value = get_property(raw, key)
    found = None if value is None else value.decode("utf-8", "replace")
    assert found == decode_properties(raw).get(key.decode())


_items = st.lists(
    st.builds(
        BatchItem, st.binary(max_size=10), st.binary(max_size=10), st.integers(-(2**31), 2**31 - 1)
    ),
    max_size=4,
)


@given(_items)
def test_a_batch_decodes_to_its_items(items: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(items)) == items


@given(hosts, I64)
def test_an_offset_message_id_names_host_and_offset(store_host: bytes, phy_offset: int) -> None:
    message_id = encode_offset_message_id(store_host, phy_offset)
    assert decode_offset_message_id(message_id) == (*unpack_host(store_host), phy_offset)
