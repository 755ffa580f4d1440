from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dledger.jepsen_like.chaos.link_model import FRAME_BYTES_MAX, FrameEdges, Piece
from dledger.raft import wire

bodies = st.lists(st.binary(max_size=40), min_size=1, max_size=12)
# How much comes at once, and whether frames are looked at then.
turns = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=40)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@given(bodies, turns)
def test_frames_are_found_from_any_byte(
    contents: list[bytes], looks: list[tuple[int, bool]]
) -> None:
    stream = b"".join(map(frame, contents))
    begins, at = {}, 0
    for body in contents:
        begins[at] = frame(body)
        at += 4 + len(body)
    edges, passed, fed, turn = FrameEdges(), b"", 0, 0
    while fed < len(stream):
        size, cuts = looks[turn % len(looks)]
        turn += 1
        data = memoryview(stream[fed : fed + size])
        fed += len(data)
        if cuts:
            for piece in edges.cut(data):
                if piece.is_frame:
                    assert begins[len(passed)] == piece.data
                passed += piece.data
        else:
            whole = edges.release() + data
            edges.follow(memoryview(whole))
            passed += whole
    assert not edges.has_rest
    assert passed == stream


def test_all_frames_are_found_when_all_are_looked_at() -> None:
    edges, stream = FrameEdges(), frame(b"") + frame(b"one") + frame(b"two")
    found = [piece for at in range(len(stream)) for piece in edges.cut(memoryview(stream)[at:][:1])]
    assert found == [Piece(frame(body), is_frame=True) for body in (b"", b"one", b"two")]


def test_a_frame_that_is_too_long_to_keep_passes_as_it_is() -> None:
    edges = FrameEdges()
    begin = (FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(100)
    assert edges.cut(memoryview(frame(b"a") + begin)) == [
        Piece(frame(b"a"), is_frame=True),
        Piece(begin, is_frame=False),
    ]
    rest = bytes(FRAME_BYTES_MAX + 1 - 100)
    assert edges.cut(memoryview(rest + frame(b"b"))) == [
        Piece(rest, is_frame=False),
        Piece(frame(b"b"), is_frame=True),
    ]


def test_the_longest_frame_of_members_can_be_looked_at() -> None:
    assert FRAME_BYTES_MAX >= wire.FRAME_BYTES_MAX + 4
