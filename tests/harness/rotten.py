"""Bits that go bad on the disk under a group, and what must never come of them."""

from pathlib import Path

from dledger.commitlog.entry import KIND_RECORDS, parse_header
from dledger.commitlog.record import Record, body_crc, iter_records
from tests.harness.fake_group import SEGMENT_BYTES, FakeGroup


def flip_bit(
    root: Path, position: int, *, segment_bytes: int = SEGMENT_BYTES, bit: int = 1
) -> None:
    """Flip one bit of the byte at *position* of the log, in the file."""
    base = position - position % segment_bytes
    with (root / "commitlog" / f"{base:020}").open("r+b") as file:
        file.seek(position - base)
        (byte,) = file.read(1)
        file.seek(position - base)
        file.write(bytes([byte ^ bit]))


def records_of(group: FakeGroup) -> list[Record]:
    """Return every record of the log as it stands on disk, with valid checksums or not."""
    found: list[Record] = []
    for index in range(group.log.first_index, group.log.last_index + 1):
        frame = group.log.frame(index)
        header = parse_header(frame)
        if header.kind == KIND_RECORDS:
            found += iter_records(frame[header.body_start :], check_crc=False)
    return found


def valid_with_body(group: FakeGroup, body: bytes) -> list[Record]:
    """Return the records with *body* whose checksum is valid."""
    return [
        record
        for record in records_of(group)
        if bytes(record.body) == body and record.body_crc == body_crc(body)
    ]
