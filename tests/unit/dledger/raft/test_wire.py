"""Peer frames: what is damaged, late or foreign never gets past the decoder."""

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.errors import RemoteProtocolError
from dledger.raft.wire import (
    FIELDS,
    FIXED,
    FRAME_BYTES_MAX,
    NUMBER_MAX,
    TERM_MAX,
    Kind,
    PeerFrameDecoder,
    crc_of,
    encode_frame,
    encode_head,
)

KINDS = st.sampled_from([kind for kind in Kind if kind not in (Kind.HELLO, Kind.HELLO_ACK)])


@st.composite
def frames(draw: st.DrawFn) -> tuple[Kind, tuple[int, ...], bytes, bytes]:
    kind = draw(KINDS)
    fields = tuple(draw(st.integers(0, field.value)) for field in FIELDS[kind])
    payload = draw(st.binary(max_size=200))
    data = encode_frame(encode_head(kind, 7, 11, 13, fields), [memoryview(payload)])
    return kind, fields, payload, data


def test_heartbeat_frame_has_these_bytes() -> None:
    data = encode_frame(encode_head(Kind.HEARTBEAT, 3, 1, 2, (9, 4)))
    assert data.hex() == "0000002f" + data[4:8].hex() + "0029" + "05" + "".join(
        f"{n:016x}" for n in (3, 1, 2, 9, 4)
    )


@given(st.lists(frames(), max_size=5))
def test_frames_fed_byte_by_byte_come_out_whole(
    given_frames: list[tuple[Kind, tuple[int, ...], bytes, bytes]],
) -> None:
    decoder = PeerFrameDecoder()
    out = []
    for byte in b"".join(data for *_, data in given_frames):
        out += decoder.feed(bytes([byte]))
    assert [(f.kind, tuple(f.fields), bytes(f.payload)) for f in out] == [
        (kind, fields, payload) for kind, fields, payload, _ in given_frames
    ]
    assert all((f.term, f.epoch, f.sequence) == (7, 11, 13) for f in out)


@given(frames(), st.data())
def test_one_flipped_bit_is_never_a_frame(
    frame: tuple[Kind, tuple[int, ...], bytes, bytes], data: st.DataObject
) -> None:
    damaged = bytearray(frame[3])
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << (bit % 8)
    decoder = PeerFrameDecoder()
    try:
        assert decoder.feed(bytes(damaged)) == []  # a longer length waits for more
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError, match="in error already"):
            decoder.feed(b"")


def _with_head(head: object) -> bytes:
    encoded = cbor2.dumps(head)
    return encode_frame(len(encoded).to_bytes(2, "big") + encoded)


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        ([99, 1, 1, 1], "unknown kind 99"),
        ([int(Kind.VOTE_REPLY), 1, 1, 1, 5], "VOTE_REPLY frame with 1 fields"),
        ([int(Kind.HEARTBEAT), 1, 1, 1, "x", 1], "not numbers"),
        ([int(Kind.HEARTBEAT), -1, 1, 1, 1, 1], "not numbers"),
        ([int(Kind.HEARTBEAT), TERM_MAX + 1, 1, 1, 1, 1], "no member comes to"),
        ([int(Kind.HEARTBEAT), 2**200, 1, 1, 1, 1], "no member comes to"),
        ([2**20000, 1, 1, 1, 1, 1], "no member comes to"),
        ([int(Kind.HEARTBEAT), 1, NUMBER_MAX + 1, 1, 1, 1], "no member comes to"),
        ([int(Kind.HEARTBEAT), 1, 1, 2**63, 1, 1], "no member comes to"),
        ({"kind": 5}, "not what this version sends"),
        ([5], "not what this version sends"),
    ],
)
def test_foreign_heads_are_refused(head: object, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        PeerFrameDecoder().feed(_with_head(head))


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_has_its_bounds(kind: Kind) -> None:
    largest = [field.value for field in FIELDS[kind]]
    (frame,) = PeerFrameDecoder().feed(_with_head([int(kind), TERM_MAX, 1, 1, *largest]))
    assert frame.fields == largest
    for at, limit in enumerate(largest):
        for beyond in (limit + 1, -1, 2**63, 2**20000):
            fields = [*largest[:at], beyond, *largest[at + 1 :]]
            with pytest.raises(RemoteProtocolError, match="no member comes to"):
                PeerFrameDecoder().feed(_with_head([int(kind), 1, 1, 1, *fields]))


def _fixed_head(kind: Kind, numbers: tuple[int, ...]) -> bytes:
    term, epoch, sequence, *fields = numbers
    return encode_head(kind, term, epoch, sequence, tuple(fields))


@pytest.mark.parametrize("kind", sorted(FIXED))
def test_every_number_of_a_fixed_head_has_its_bounds(kind: Kind) -> None:
    largest = (TERM_MAX, NUMBER_MAX, NUMBER_MAX, *(field.value for field in FIELDS[kind]))
    head = _fixed_head(kind, largest)
    (frame,) = PeerFrameDecoder().feed(encode_frame(head))
    assert (frame.term, frame.epoch, frame.sequence, *frame.fields) == largest
    for at, limit in enumerate(largest):
        for beyond in (limit + 1, (1 << 64) - 1):
            numbers = (*largest[:at], beyond, *largest[at + 1 :])
            head = _fixed_head(kind, numbers)
            with pytest.raises(RemoteProtocolError, match="no member comes to"):
                PeerFrameDecoder().feed(encode_frame(head))


@pytest.mark.parametrize("kind", sorted(FIXED))
def test_a_fixed_head_of_another_length_is_refused(kind: Kind) -> None:
    head = encode_head(kind, 1, 1, 1, (1,) * len(FIELDS[kind]))[2:]
    for encoded in (head[:-1], head + b"\x00", head[:1]):
        with pytest.raises(RemoteProtocolError, match="head is not"):
            PeerFrameDecoder().feed(encode_frame(len(encoded).to_bytes(2, "big") + encoded))


@given(st.lists(st.binary(max_size=50), max_size=4))
def test_a_known_checksum_makes_the_same_frame(pieces: list[bytes]) -> None:
    payload = [memoryview(piece) for piece in pieces]
    head = encode_head(Kind.APPEND, 1, 2, 3, (4, 1, 4))
    assert encode_frame(head, payload, crc_of(payload)) == encode_frame(head, payload)


def test_frames_received_at_once_are_read_where_they_are() -> None:
    first = encode_frame(encode_head(Kind.APPEND, 1, 1, 1, (0, 0, 0)), [memoryview(b"entry")])
    rest = encode_frame(encode_head(Kind.APPEND_REPLY, 1, 1, 2, (True, 5)))
    decoder = PeerFrameDecoder()
    data = first + rest[:9]
    (frame,) = decoder.feed(data)
    assert bytes(frame.payload) == b"entry"
    assert frame.payload.obj is data
    assert decoder.pending_bytes == 9
    (reply,) = decoder.feed(rest[9:])
    assert (reply.kind, reply.fields) == (Kind.APPEND_REPLY, [True, 5])


@pytest.mark.parametrize(
    "encoded",
    [
        "d81cc1f6",  # a shared value that ends early
        "8505 d81c81d81d00 01 01 01".replace(" ", ""),  # a list that contains itself
        "c482 1b7fffffffffffffff 01".replace(" ", ""),  # a decimal with a huge exponent
        "c582 1b7fffffffffffffff 01".replace(" ", ""),
        "d81e820100",  # 1/0
        "d823 61 28".replace(" ", ""),  # the pattern "("
        "9f" * 2000,
    ],
)
def test_a_head_of_strange_cbor_is_refused(encoded: str) -> None:
    head = bytes.fromhex(encoded)
    with pytest.raises(RemoteProtocolError, match="head is not"):
        PeerFrameDecoder().feed(encode_frame(len(head).to_bytes(2, "big") + head))


def test_bytes_behind_the_cbor_head_are_refused() -> None:
    encoded = cbor2.dumps([int(Kind.VOTE_REPLY), 1, 1, 1]) + b"\x00"
    with pytest.raises(RemoteProtocolError, match="not what this version sends"):
        PeerFrameDecoder().feed(encode_frame(len(encoded).to_bytes(2, "big") + encoded))


def test_a_frame_that_ends_with_its_head_length_is_refused() -> None:
    for head, payload in ((bytes(2), b""), (bytes(2), b"payload"), (b"\x00\x09\x05", b"")):
        with pytest.raises(RemoteProtocolError, match="without its head"):
            PeerFrameDecoder().feed(encode_frame(head, [memoryview(payload)]))


@pytest.mark.parametrize("length", [0, 5, FRAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_wire_refuses_lengths_out_of_bounds(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="a peer frame of"):
        PeerFrameDecoder().feed(length.to_bytes(4, "big") + bytes(4))
