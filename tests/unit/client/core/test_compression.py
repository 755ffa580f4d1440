"""Bodies compressed in RocketMQ's three ways: ours, those of others, damaged ones, and bombs."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import lz4.frame
import pytest
import zstandard

from dledger.client.core.message_ext import (
    MAX_DECOMPRESSED_BYTES,
    CompressionType,
    check_level,
    compress,
    decompress,
)
from dledger.commitlog.errors import ConfigError, CorruptRecordError
from dledger.jepsen_like.seeded_rng import rng_stream

LZ4, ZSTD, ZLIB = CompressionType.LZ4, CompressionType.ZSTD, CompressionType.ZLIB
TEXT = b"".join(b"line %d\n" % number for number in range(20_000))
MIB = 1 << 20


def test_the_types_are_those_of_rocketmq() -> None:
    assert {kind.name: kind.sys_flag for kind in CompressionType} == {
        "LZ4": 0x101,
        "ZSTD": 0x201,
        "ZLIB": 0x301,
    }


@pytest.mark.parametrize("kind", CompressionType)
@pytest.mark.parametrize(
    "body",
    [b"x", TEXT, bytes(5 * MIB), rng_stream(1).randbytes(300_000)],
    ids=["one byte", "text", "zeros", "noise"],
)
def test_compress_then_decompress_is_the_identity(kind: CompressionType, body: bytes) -> None:
    folded = compress(body, kind, 5)
    # Other bits of the sysFlag say other things.
    assert decompress(folded, kind.sys_flag | 0x3E) == body
    assert decompress(memoryview(folded), kind.sys_flag) == body
    assert compress(memoryview(body), kind, 5) == folded


@pytest.mark.parametrize("kind", [ZSTD, ZLIB])
def test_compress_at_a_higher_level_is_smaller(kind: CompressionType) -> None:
    sizes = [len(compress(TEXT, kind, level)) for level in (1, 9)]
    assert sizes[0] > sizes[1]


def test_lz4_frames_have_blocks_on_their_own() -> None:
    """Java's reader refuses others; FLG is the fifth byte, bit 5 means independent."""
    folded = compress(TEXT * 50, LZ4, 5)
    assert folded[:4] == bytes.fromhex("04224d18")
    assert folded[4] & 0x20
    assert not lz4.frame.get_frame_info(folded)["block_linked"]
    assert len(TEXT * 50) > lz4.frame.get_frame_info(folded)["block_size"]


# Written by hand from the formats: what Java's streams write for b"hello", sizes unsaid.
FOREIGN = {
    "lz4": (bytes.fromhex("04224d18 6070 73 05000080 68656c6c6f 00000000"), 0x101),
    "zstd": (bytes.fromhex("28b52ffd 00 58 290000 68656c6c6f"), 0x201),
    "zlib": (bytes.fromhex("789c cb48cdc9c907 00 062c0215"), 0x301),
    "zlib of old clients": (bytes.fromhex("789c cb48cdc9c907 00 062c0215"), 1),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_decompress_reads_bodies_of_other_clients(name: str) -> None:
    folded, sys_flag = FOREIGN[name]
    assert decompress(folded, sys_flag) == b"hello"


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_decompress_refuses_an_undefined_type(kind: int) -> None:
    with pytest.raises(CorruptRecordError, match=rf"type {kind}; this client reads 1 \(LZ4\)"):
        decompress(b"x", 1 | kind << 8)


@pytest.mark.parametrize("kind", CompressionType)
@pytest.mark.parametrize("body", [b"junk that is no frame", b"\0" * 40])
def test_what_is_no_frame_is_refused(kind: CompressionType, body: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="damaged"):
        decompress(body, kind.sys_flag)


@pytest.mark.parametrize("kind", CompressionType)
def test_a_frame_cut_anywhere_is_refused(kind: CompressionType) -> None:
    folded = compress(TEXT[:2000], kind, 5)
    for end in range(len(folded)):
        with pytest.raises(CorruptRecordError, match=r"cut|damaged"):
            decompress(folded[:end], kind.sys_flag)


@pytest.mark.parametrize("kind", CompressionType)
def test_the_frame_of_another_type_is_refused(kind: CompressionType) -> None:
    for other in CompressionType:
        if other is not kind:
            with pytest.raises(CorruptRecordError, match="damaged"):
                decompress(compress(TEXT, other, 5), kind.sys_flag)


def zstd_bomb_without_its_size(size: int) -> bytes:
    run_of_zeros = (128 << 13 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (128 << 13 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return bytes.fromhex("28b52ffd0058") + run_of_zeros * (size // (128 << 10)) + last


BOMBS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "lz4": (lambda size: lz4.frame.compress(bytes(size)), 0x101),
    "zstd with its size": (lambda size: zstandard.ZstdCompressor().compress(bytes(size)), 0x201),
    "zstd that does not": (zstd_bomb_without_its_size, 0x201),
    "zlib": (lambda size: zlib.compress(bytes(size), 1), 0x301),
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompress_refuses_a_body_over_its_limit_by_name(name: str) -> None:
    make, sys_flag = BOMBS[name]
    folded = make(4 * MAX_DECOMPRESSED_BYTES)
    assert len(folded) < 2 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="more than 67108864 bytes"):
            decompress(folded, sys_flag)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Parts and the whole they are joined to.
    assert peak < 2 * (MAX_DECOMPRESSED_BYTES + 8 * MIB) + 4 * MIB


@pytest.mark.parametrize("kind", CompressionType)
def test_the_limit_itself_is_no_bomb(kind: CompressionType) -> None:
    folded = compress(TEXT, kind, 5)
    assert decompress(folded, kind.sys_flag, max_bytes=len(TEXT)) == TEXT
    with pytest.raises(CorruptRecordError, match="more than"):
        decompress(folded, kind.sys_flag, max_bytes=len(TEXT) - 1)


def test_levels() -> None:
    for kind, good, bad in ((ZLIB, (0, 9), (-1, 10)), (ZSTD, (1, 22), (0, 23))):
        for level in good:
            check_level(kind, level)
        for level in bad:
            with pytest.raises(ConfigError, match=f"compress_level is {level}; {kind.name} has"):
                check_level(kind, level)
    check_level(LZ4, 100)
    assert len({compress(TEXT, LZ4, level) for level in (0, 100)}) == 1
