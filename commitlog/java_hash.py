"""Java's ``String.hashCode``, and what RocketMQ makes of it: tag codes and hashes of index keys.

They run over UTF-16 units, ``h = 31·h + unit`` in 32 bits.

Spec: docs/reference/formats.md, sections 3 and 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_MASK: Final = 0xFFFFFFFF
_SIGN: Final = 0x80000000
_INT_MIN: Final = -0x80000000

MAX_CACHED_HASHES: Final = 4096
"""Tag codes and topic prefixes kept; a broker sees few distinct ones again and again."""

TOPIC_KEY_SEPARATOR: Final = "#"
"""Between topic and key in the string the key index hashes."""


def java_hash(text: str, prefix_hash: int = 0) -> int:
    """Return Java's hash of a string, as a signed 32-bit number."""
    value = prefix_hash & _MASK
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & _MASK
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        for i in range(0, len(raw), 2):
            value = (31 * value + (raw[i] << 8 | raw[i + 1])) & _MASK
    return (value ^ _SIGN) - _SIGN


def tags_code(tags: str) -> int:
    """Return what a consume queue unit holds for TAGS; 0 for none."""
    return java_hash(tags)


@lru_cache(MAX_CACHED_HASHES)
def raw_tags_code(tags: bytes) -> int:
    """Return `tags_code` for TAGS as they stand in a record; bad UTF-8 counts as U+FFFD."""
    return tags_code(tags.decode("utf-8", "replace"))


@lru_cache(MAX_CACHED_HASHES)
def topic_prefix_hash(topic: str) -> int:
    """Return the hash of *topic* and the separator, to continue with a key."""
    return java_hash(topic + TOPIC_KEY_SEPARATOR)


def index_key_hash(topic: str, key: str) -> int:
    """Return the hash under which the key index files *key* of *topic*: never negative."""
    value = java_hash(key, topic_prefix_hash(topic))
    return 0 if value == _INT_MIN else abs(value)
