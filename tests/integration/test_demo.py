"""The demo end to end, and its checker on a log that lost one acknowledged message."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitlog.disk import OsDisk
from commitlog.entry import RecordBatch, Run, record_sizes, seal_entry, seal_no_op
from commitlog.entry_log import EntryLog
from commitlog.record import decode_record, pack_host
from dledger.cli.demo_check import key_in
from dledger.cli.demo_record import RecordedRun
from dledger.cli.log_walk import open_segments, walk

pytestmark = pytest.mark.slow


def dledger(*tokens: str) -> tuple[int, dict[str, Any]]:
    """Run the command and return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "dledger.cli.main", *tokens, "--output", "json"],
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def rewrite_without(store: Path, missing: str) -> None:
    """Write a store's log anew, every checksum right, with one message left out."""
    before = open_segments(store / "commitlog")
    anew = store.parent / "anew"
    disk = OsDisk()
    disk.make_dir(str(anew))
    log = EntryLog.open(disk, str(anew), segment_bytes=len(before[0].data), trusted=None)
    for header, frame in ((entry.header, entry.frame) for entry in walk(before)):
        index, term, chain = log.last_index + 1, header.term, log.last_chain
        kept: list[bytes] = []
        runs: list[Run] = []
        offsets: list[int] = []
        start = header.body_start
        for size in record_sizes(frame, header).tolist():
            record = decode_record(frame, start)
            if key_in(bytes(record.body)) != missing:
                kept.append(bytes(frame[start : start + size]))
                runs.append(Run(record.topic, record.queue_id, 1))
                offsets.append(record.queue_offset)
            start += size
        size = 72 + 4 * len(kept) + sum(map(len, kept))
        if not kept:
            log.append(seal_no_op(index, term, log.place(size), chain, header.store_time_ms))
            continue
        sizes = np.array([len(record) for record in kept], np.uint32)
        log.append(
            seal_entry(
                [RecordBatch(b"".join(kept), sizes, tuple(runs))],
                offsets,
                index=index,
                term=term,
                position=log.place(size),
                prev_chain=chain,
                store_time_ms=header.store_time_ms,
                store_host=pack_host("127.0.0.1", 10911),
            )
        )
    log.flush()
    log.close()
    shutil.rmtree(store / "commitlog")
    (anew / "commitlog").rename(store / "commitlog")
    shutil.rmtree(anew)


def test_the_demo_loses_nothing_and_its_checker_notices_when_something_is_lost(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    code, verdict = dledger("demo", "--keep", str(folder))
    assert code == 0, verdict
    assert verdict["acknowledged"] >= 10_000
    assert verdict["lost"] == verdict["reordered"] == verdict["changed"] == 0
    assert verdict["replicas_equal"] is True
    assert 0 < verdict["failover_ms"] <= 2_000

    for name in ("n0", "n1", "n2"):
        code, report = dledger("log", "verify", str(folder / name / "store"))
        assert (code, report["problems"]) == (0, [])
    code, again = dledger("demo", "--check", str(folder))
    assert (code, again) == (0, verdict)

    run = RecordedRun.load(folder)
    victim = next(row.key for row in run.sent[2_000:] if row.outcome == "stored")
    rewrite_without(folder / "n1" / "store", victim)
    code, verdict = dledger("demo", "--check", str(folder))
    assert code == 1
    assert verdict["lost_keys"] == [victim]
    assert verdict["replicas_equal"] is False
    for name in ("n0", "n2"):
        rewrite_without(folder / name / "store", victim)
    code, verdict = dledger("demo", "--check", str(folder))
    assert (code, verdict["lost"], verdict["lost_keys"]) == (1, 1, [victim])
