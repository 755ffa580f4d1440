"""Sealing and deriving by columns equal the plain way, whatever the records are."""

import struct
import zlib
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.derive import Derived, derive, derive_bulk, derive_plain
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    RecordBatch,
    parse_header,
    record_sizes,
    record_starts,
    seal_entry,
    verify_frame,
)
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.commitlog.record import NO_HOST, encode_record
from dledger.commitlog.record_batch import verify_record_layout
from dledger.state.state_record import with_hosts
from tests.harness.extent import examples
from tests.property.strategies_records import (
    SealedEntry,
    batch_of,
    mutations,
    record_arguments,
    sealed_entries,
)


def reference_frame(
    batches: list[tuple[list[dict[str, Any]], bytes | None]],
    queue_offsets: list[int],
    *,
    index: int,
    term: int,
    position: int,
    prev_chain: int,
    store_time_ms: int,
    store_host: bytes,
) -> bytes:
    """Seal record by record: every record is encoded with its final fields."""
    offsets = iter(queue_offsets)
    plan: list[dict[str, Any]] = []
    for arguments, born_host in batches:
        last: tuple[str, int] | None = None
        queue_offset = 0
        for one in arguments:
            queue = one["topic"], one["queue_id"]
            if queue != last:
                queue_offset = next(offsets)
                last = queue
            final = one | {
                "queue_offset": queue_offset,
                "store_timestamp_ms": store_time_ms,
                "store_host": store_host,
            }
            if born_host is not None:
                final["born_host"] = born_host
            plan.append(final)
            queue_offset += 1
    start = ENTRY_HEADER_BYTES + 4 * len(plan)
    records: list[bytes] = []
    for final in plan:
        final["phy_offset"] = position + start
        records.append(encode_record(**final))
        start += len(records[-1])
    table = b"".join(struct.pack(">I", len(record)) for record in records)
    behind = table + b"".join(records)
    body_crc = zlib.crc32(behind)
    head = struct.pack(
        ">IIqqqIHHq",
        0xD1ED6E01,
        ENTRY_HEADER_BYTES + len(behind),
        index,
        term,
        position,
        len(records),
        1,
        1,
        store_time_ms,
    )
    chained = struct.pack(">Q", prev_chain) + head + struct.pack(">I", body_crc)
    head += blake2b(chained, digest_size=8).digest() + struct.pack(">II", body_crc, 0)
    pad = bytes(4)
    return head + struct.pack(">I", zlib.crc32(head + pad)) + pad + behind


@st.composite
def _uniform_batches(
    draw: st.DrawFn,
) -> tuple[list[tuple[list[dict[str, Any]], bytes | None]], bytes]:
    store_host = draw(st.sampled_from([b"\x7f\0\0\1\0\0\x2a\x9f", bytes(range(20))]))
    kinds = draw(st.lists(record_arguments, min_size=1, max_size=5))
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        picks = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=25))
        records: list[dict[str, Any]] = [
            pick | {"store_host": bytes(len(store_host))} for pick in picks
        ]
        born_host = None
        if draw(st.booleans()):
            # One born host fits records of one width only.
            width = len(records[0]["born_host"])
            born_host = draw(st.binary(min_size=width, max_size=width))
            records = [record | {"born_host": bytes(width)} for record in records]
        batches.append((records, born_host))
    return batches, store_host


@given(_uniform_batches(), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_sealing_equals_encoding_final_records(
    drawn: tuple[list[tuple[list[dict[str, Any]], bytes | None]], bytes],
    position: int,
    prev_chain: int,
) -> None:
    plan, store_host = drawn
    batches = []
    for records, born_host in plan:
        sent = [record | {"store_host": NO_HOST} for record in records]
        if born_host is not None:
            sent = [record | {"born_host": NO_HOST} for record in sent]
        batches.append(with_hosts(batch_of(sent, born_host), store_host))
    queue_offsets = [7 * i for i in range(sum(len(batch.runs) for batch in batches))]
    facts: dict[str, Any] = {
        "index": 5,
        "term": 3,
        "position": position,
        "prev_chain": prev_chain,
        "store_time_ms": 1_795_147_871_927,
        "store_host": store_host,
    }
    frame = seal_entry(batches, queue_offsets, **facts)
    assert frame == reference_frame(plan, queue_offsets, **facts)
    header = parse_header(frame)
    verify_frame(frame, header, prev_chain)
    starts = record_starts(frame, header)
    assert starts[0] == header.body_start
    assert starts[-1] + record_sizes(frame, header)[-1] == header.size


def assert_same(left: Derived, right: Derived) -> None:
    for name in (
        "starts",
        "queue_offset",
        "phy_offset",
        "size",
        "tags_code",
        "store_time_ms",
        "queue_id",
        "sys_flag",
        "units",
        "key_hashes",
        "key_phy_offsets",
    ):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype, name
        assert ours.tolist() == theirs.tolist(), name
    assert [group[:2] for group in left.groups] == [group[:2] for group in right.groups]
    rows = np.arange(len(left.size))
    for ours, theirs in zip(left.groups, right.groups, strict=True):
        assert type(ours.where) is type(theirs.where)
        assert rows[ours.where].tolist() == rows[theirs.where].tolist()


@given(sealed_entries())
def test_deriving_by_columns_equals_decoding_record_by_record(entry: SealedEntry) -> None:
    header = parse_header(entry.frame)
    plain = derive_plain(entry.frame, header)
    assert_same(derive_bulk(entry.frame, header), plain)
    assert_same(derive(entry.frame, header), plain)
    assert len(plain.size) == len(entry.records)


@given(st.data(), sealed_entries(max_records=12))
def test_damage_to_a_frame_is_noticed(data: st.DataObject, entry: SealedEntry) -> None:
    frame = bytes(entry.frame)
    header = parse_header(frame)
    damaged = data.draw(mutations(frame))
    if damaged == frame:
        return
    with pytest.raises(CorruptEntryError):
        verify_frame(damaged, parse_header(damaged), entry.prev_chain)
    # Deriving checks no sums, but never leaves the frame nor raises anything else.
    outcomes: list[Derived | None] = []
    for way in (derive_bulk, derive_plain):
        try:
            outcomes.append(way(damaged, header))
        except CorruptEntryError:
            outcomes.append(None)
    bulk, plain = outcomes
    assert (bulk is None) == (plain is None)
    if bulk is not None and plain is not None:
        assert_same(bulk, plain)


def _as_a_client_may_send(one: dict[str, Any]) -> dict[str, Any]:
    return one | {
        "topic": "T1" if len(one["topic"].encode()) > 127 else one["topic"],
        "queue_id": one["queue_id"] & 3,
        "sys_flag": one["sys_flag"] & 0x701,
        "body": one["body"] or b"hello0",
        "born_host": bytes(8),
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
    }


_sendable = record_arguments.map(_as_a_client_may_send)


@given(st.lists(_sendable, min_size=1, max_size=12))
def test_a_client_batch_in_order_is_accepted(records: list[dict[str, Any]]) -> None:
    batch = batch_of(records)
    verify_record_layout(batch.records, batch.sizes, batch.runs)


@settings(max_examples=examples(200))
@given(st.data(), st.lists(_sendable, min_size=1, max_size=4))
def test_a_damaged_client_batch_is_refused_or_harmless(
    data: st.DataObject, records: list[dict[str, Any]]
) -> None:
    batch = batch_of(records)
    assert isinstance(batch.records, bytes)
    damaged = data.draw(mutations(batch.records))
    try:
        verify_record_layout(damaged, batch.sizes, batch.runs)
    except CorruptRecordError:
        return
    # What passes seals and derives like any other batch.
    frame = seal_entry(
        [RecordBatch(damaged, batch.sizes, batch.runs)],
        [0] * len(batch.runs),
        index=1,
        term=1,
        position=0,
        prev_chain=0,
        store_time_ms=0,
        store_host=bytes(8),
    )
    header = parse_header(frame)
    assert_same(derive_bulk(frame, header), derive_plain(frame, header))
