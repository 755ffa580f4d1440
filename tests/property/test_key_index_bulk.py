"""Keys put in bulk make the files that keys put one by one make."""

from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.key_index import KeyIndex
from dledger.commitlog.key_index_file import IndexFile
from tests.harness.extent import examples


def _put(index: KeyIndex, keys: list[tuple[int, int, int]]) -> None:
    hashes, offsets, times = zip(*keys, strict=True)
    index.put_bulk(
        np.array(hashes, np.int32), np.array(offsets, np.int64), np.array(times, np.int64)
    )


def _files(disk: OsDisk, root: str) -> dict[str, bytes]:
    return {name: disk.read(f"{root}/{name}") for name in disk.list_dir(root)}


_KEYS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 50), st.integers(0, 3000)), min_size=1, max_size=40
)


@settings(max_examples=examples(40), deadline=None)
@given(_KEYS, st.integers(1, 40), st.integers(0, 40))
def test_bulk_equals_one_by_one_also_across_files_and_a_reload(
    steps: list[tuple[int, int, int]], split: int, reload_at: int
) -> None:
    keys: list[tuple[int, int, int]] = []
    phy_offset, time_ms = 0, 1_795_147_871_000
    for key_hash, size, wait_ms in steps:
        phy_offset += size
        time_ms += wait_ms
        keys.append((key_hash, phy_offset, time_ms))
    disk = OsDisk()
    with tempfile.TemporaryDirectory() as folder:
        one, many = f"{folder}/one", f"{folder}/many"
        first = KeyIndex(disk, one, slots=5, max_entries=9)
        for key in keys:
            _put(first, [key])
        first.flush()
        second = KeyIndex(disk, many, slots=5, max_entries=9)
        for i, start in enumerate(range(0, len(keys), split)):
            _put(second, keys[start : start + split])
            if i == reload_at:
                second.flush()
                second.close()
                second = KeyIndex(disk, many, slots=5, max_entries=9)
        second.flush()
        assert _files(disk, many) == _files(disk, one)

        cut = keys[len(keys) // 2][1]
        kept = [key for key in keys if key[1] < cut]
        second.truncate_beyond(cut)
        second.flush()
        again = KeyIndex(disk, f"{folder}/kept", slots=5, max_entries=9)
        if kept:
            _put(again, kept)
        found = [entry for file in again._files for entry in _entries(file)]
        assert [entry for file in second._files for entry in _entries(file)] == found
        for index in (first, second, again):
            index.close()


def _entries(file: IndexFile) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = file.entries(1, file.header.next_entry).tolist()
    return rows
