"""A snapshot that a peer made up is refused, whatever stands in it under a valid checksum."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.state.snapshot import framed, snapshot
from tests.harness.extent import examples
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch

HOSTILE: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**40, 2**63, 2**200, 1.5, "", "x", b"", b"x",
    [],
    {},
    [[]],
    True,
)  # fmt: skip

CHANGES = 3000

HEADER_BYTES = 24


def changed(rng: random.Random, value: Any) -> Any:
    """Return *value* with one thing in it, at any depth, that should not be there."""
    if rng.random() < 0.3 or not isinstance(value, list | dict) or not value:
        return rng.choice(HOSTILE)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(sorted(value, key=repr))
    if rng.random() < 0.1:
        return {other: kept for other, kept in value.items() if other != key}
    return {**value, key: changed(rng, value[key])}


@pytest.mark.usefixtures("autojump_clock")
async def test_a_made_up_snapshot_is_refused_or_read(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"a"))
        store, rng = leader.group.store, random.Random(3)
        honest = cbor2.loads(snapshot(leader.group.state)[HEADER_BYTES:])
        ends: Counter[str] = Counter()
        for _ in range(examples(CHANGES)):
            body = cbor2.dumps(changed(rng, honest))
            try:
                store.decode(framed(body))
                ends["read"] += 1
            except (CorruptStoreError, ForeignStoreError):
                ends["refused"] += 1
        assert min(ends["read"], ends["refused"]) > 0, ends
