"""Bodies folded and unfolded in the three ways RocketMQ knows.

Which way is said by the record's sysFlag: bit 0, and the type in bits 8 to 10. Brokers store and
return bodies as they came; only the two ends of a message look inside.

Spec: docs/internals/protocol/store.md, section 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

import lz4.frame
import zstandard
from typing_extensions import Buffer

from commitlog.errors import ConfigError, CorruptRecordError
from commitlog.record import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_TYPE_MASK

MAX_DECOMPRESSED_BYTES: Final = 64 * 1024 * 1024
"""A compressed body that unfolds to more is refused: a bomb, not a message."""
ZSTD_STEP_BYTES: Final = 256
"""Folded bytes that are unfolded between two looks at the size. Four of them can become 128 KiB: so
a bomb takes 8 MiB more than the limit before it is found out."""

_TYPE_SHIFT: Final = 8
_ZLIB_OF_OLD_CLIENTS: Final = 0


class CompressionType(Enum):
    """How a body is folded; the number is what the sysFlag says."""

    LZ4 = 1
    """LZ4 frames: the fastest. It has no levels in RocketMQ."""
    ZSTD = 2
    """Zstandard, levels 1 to 22: smaller than zlib, and faster."""
    ZLIB = 3
    """zlib, levels 0 to 9: RocketMQ's default, and all that clients before 4.9.4 can read."""

    @property
    def sys_flag(self) -> int:
        """The bits a message carries whose body is folded so."""
        return SYS_FLAG_COMPRESSED | self.value << _TYPE_SHIFT


_LEVELS: Final[Mapping[CompressionType, range]] = {
    CompressionType.ZSTD: range(1, 23),
    CompressionType.ZLIB: range(10),
}


def check_level(kind: CompressionType, level: int) -> None:
    """Refuse a level that *kind* does not have.

    Raises:
        ConfigError: It has no such level.
    """
    levels = _LEVELS.get(kind)
    if levels is not None and level not in levels:
        raise ConfigError(
            f"compress_level is {level}; {kind.name} has {levels.start} to {levels.stop - 1}"
        )


def compress(body: Buffer, kind: CompressionType, level: int) -> bytes:
    """Return *body* folded; the caller compares sizes.

    Args:
        level: One `check_level` lets pass.
    """
    match kind:
        case CompressionType.LZ4:
            # RocketMQ's Java client reads no frames whose blocks refer to one another.
            return bytes(
                lz4.frame.compress(
                    bytes(body),
                    block_size=lz4.frame.BLOCKSIZE_MAX4MB,
                    block_linked=False,
                    store_size=False,
                )
            )
        case CompressionType.ZSTD:
            return zstandard.ZstdCompressor(level=level).compress(memoryview(body).cast("B"))
        case CompressionType.ZLIB:
            return zlib.compress(body, level)


def decompress(body: Buffer, sys_flag: int, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return a body unfolded.

    Args:
        body: As a record holds it.
        sys_flag: The record's; it says that the body is compressed.
        max_bytes: The body may unfold to so many.
    Raises:
        CorruptRecordError: The type is unknown, the body is damaged or cut, or it unfolds to more
            than *max_bytes*.
    """
    kind = (sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK) >> _TYPE_SHIFT
    unfold = _UNFOLD.get(kind)
    if unfold is None:
        raise CorruptRecordError(
            f"the body is compressed with type {kind}; this client reads 1 (LZ4), 2 (Zstandard) "
            "and 3 (zlib)"
        )
    try:
        unfolded, is_whole = unfold(body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, RuntimeError) as error:
        raise CorruptRecordError(f"the compressed body is damaged: {error}") from error
    if len(unfolded) > max_bytes:
        raise CorruptRecordError(
            f"the compressed body unfolds to more than {max_bytes} bytes (MAX_DECOMPRESSED_BYTES)"
        )
    if not is_whole:
        raise CorruptRecordError("the compressed body is cut")
    return unfolded


def _unfold_lz4(body: Buffer, most: int) -> tuple[bytes, bool]:
    unpacker = lz4.frame.LZ4FrameDecompressor()
    unfolded = bytes(unpacker.decompress(bytes(body), max_length=most))
    return unfolded, unpacker.eof


def _unfold_zstd(body: Buffer, most: int) -> tuple[bytes, bool]:
    # It has no bound of its own over a frame that does not say its size, as Java's do not.
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_DECOMPRESSED_BYTES).decompressobj()
    view = memoryview(body).cast("B")
    parts: list[bytes] = []
    size = 0
    for at in range(0, view.nbytes, ZSTD_STEP_BYTES):
        part = unpacker.decompress(view[at : at + ZSTD_STEP_BYTES])
        parts.append(part)
        size += len(part)
        if unpacker.eof or size >= most:
            break
    return b"".join(parts), unpacker.eof


def _unfold_zlib(body: Buffer, most: int) -> tuple[bytes, bool]:
    unpacker = zlib.decompressobj()
    return unpacker.decompress(body, most), unpacker.eof


_UNFOLD: Final[Mapping[int, Callable[[Buffer, int], tuple[bytes, bool]]]] = {
    CompressionType.LZ4.value: _unfold_lz4,
    CompressionType.ZSTD.value: _unfold_zstd,
    CompressionType.ZLIB.value: _unfold_zlib,
    _ZLIB_OF_OLD_CLIENTS: _unfold_zlib,
}
