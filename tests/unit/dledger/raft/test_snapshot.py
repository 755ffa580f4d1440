"""A snapshot is put together from chunks that may come twice, too late, or from another leader."""

import pytest

from dledger.commitlog.errors import RemoteProtocolError
from dledger.raft.snapshot import SNAPSHOT_BYTES_MAX, Receiving, Sending


def chunk(text: str) -> memoryview:
    return memoryview(text.encode())


def test_chunks_that_come_twice_or_too_early_are_dropped() -> None:
    receiving = Receiving()
    assert not receiving.add_chunk(7, 0, 6, chunk("abc"))
    assert not receiving.add_chunk(7, 0, 6, chunk("abc"))
    assert not receiving.add_chunk(7, 5, 6, chunk("f"))
    assert receiving.offset == 3
    assert receiving.add_chunk(7, 3, 6, chunk("def"))
    assert receiving.pop_data() == b"abcdef"
    assert not receiving.add_chunk(7, 3, 6, chunk("def")), "the whole was taken already"


@pytest.mark.parametrize(("index", "total"), [(8, 6), (7, 5)])
def test_another_snapshot_takes_the_place_of_the_first(index: int, total: int) -> None:
    """Leaders may write the tables of one index in other bytes: versions differ."""
    receiving = Receiving()
    receiving.add_chunk(7, 0, 6, chunk("abc"))
    assert not receiving.add_chunk(index, 3, total, chunk("XY"))
    assert receiving.offset == 0
    assert receiving.add_chunk(index, 0, total, chunk("uvwxyz"[:total]))
    assert receiving.pop_data() == b"uvwxyz"[:total]


@pytest.mark.parametrize(
    ("offset", "total"), [(0, 0), (0, -1), (0, SNAPSHOT_BYTES_MAX + 1), (2, 4)]
)
def test_chunks_that_no_snapshot_has_are_refused(offset: int, total: int) -> None:
    receiving = Receiving()
    with pytest.raises(RemoteProtocolError):
        receiving.add_chunk(7, offset, total, chunk("abc"))
    assert receiving.offset == 0


def test_sender_goes_on_where_it_was_answered() -> None:
    sending = Sending(7, b"abcdef")
    assert bytes(sending.chunk()) == b"abcdef"
    sending.offset = 4
    assert bytes(sending.chunk()) == b"ef"
