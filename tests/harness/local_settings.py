"""Settings of brokers that are started for one test."""

from __future__ import annotations

SMALL_FILES: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 10_000,
    "store.max_index_num": 40_000,
}
"""Three brokers share one disk, and a test has few messages."""
