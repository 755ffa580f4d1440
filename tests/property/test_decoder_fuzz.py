"""Two hundred thousand damaged buffers against every decoder of the store, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from dledger.commitlog.derive import derive_bulk, derive_plain
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry, verify_frame
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.commitlog.message_batch import (
    BatchItem,
    decode_batch,
    encode_batch,
    verify_record_layout,
)
from dledger.commitlog.record import encode_record, iter_records, pack_host

SEED = 20_261_120

RECORDS = [
    encode_record(topic="T1", queue_id=0, body=b"hello0", properties=b"TAGS\x01TagA\x02"),
    encode_record(topic="t" * 130, queue_id=1, body=b"b", properties=b"KEYS\x01a b"),
    encode_record(topic="T1", queue_id=0, body=b"", properties=b"", born_host=pack_host("::1", 1)),
]
BATCH = RecordBatch(
    b"".join(RECORDS),
    np.array([len(record) for record in RECORDS], np.uint32),
    (Run("T1", 0, 1), Run("t" * 130, 1, 1), Run("T1", 0, 1)),
)
FRAME = bytes(
    seal_entry(
        [BATCH],
        [0, 0, 1],
        index=1,
        term=1,
        position=0,
        prev_chain=0,
        store_time_ms=1,
        store_host=bytes(8),
    )
)
HEADER = parse_header(FRAME)
SENT = RECORDS[0] * 3


def read_frame(damaged: bytes) -> None:
    verify_frame(damaged, parse_header(damaged), 0)


def verify_sent(damaged: bytes) -> None:
    sizes = np.full(3, len(RECORDS[0]), np.uint32)
    verify_record_layout(damaged, sizes, (Run("T1", 0, 3),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "decode", "rounds"),
    [
        (b"".join(RECORDS), lambda damaged: list(iter_records(damaged)), 80_000),
        (FRAME, read_frame, 60_000),
        (FRAME, lambda damaged: derive_plain(damaged, HEADER), 20_000),
        (FRAME, lambda damaged: derive_bulk(damaged, HEADER), 10_000),
        (SENT, verify_sent, 10_000),
        (encode_batch([BatchItem(b"abc", b"k\x01v")] * 3), decode_batch, 20_000),
    ],
    ids=["records", "frame", "derive plain", "derive bulk", "client batch", "batch send"],
)
def test_damage_raises_the_decoders_own_error_only(
    good: bytes, decode: Callable[[bytes], object], rounds: int
) -> None:
    rng = random.Random(SEED)
    refused = 0
    for _ in range(rounds):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(damaged)) if damaged else 0
            match rng.randrange(6):
                case 0:
                    del damaged[at:]
                case 1:
                    damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 2:
                    damaged[at : at + 4] = rng.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)])
                case _ if damaged:
                    damaged[at] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(damaged))
        except (CorruptRecordError, CorruptEntryError):
            refused += 1
    assert refused > rounds // 4
