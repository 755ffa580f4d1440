"""A kept run: the same checker on the data folders of stopped brokers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commitlog.disk import OsDisk
from commitlog.entry import RecordBatch, Run, seal_entry, seal_no_op
from commitlog.entry_log import EntryLog
from commitlog.record import encode_record, pack_host
from dledger.cli.demo_check import Found, Sent, body_of
from dledger.cli.demo_record import RecordedRun, check_run
from dledger.cli.main import main

TOPIC = "demo"
NODES = ("n0", "n1", "n2")


def write_log(store: Path, keys: list[str]) -> int:
    """Write a log with one message per entry in queue 0; return its last index."""
    disk = OsDisk()
    disk.make_dir(str(store))
    log = EntryLog.open(disk, str(store), segment_bytes=64 * 1024, trusted=None)
    log.append(seal_no_op(1, 0, 0, 0, 0))
    for offset, key in enumerate(keys):
        record = encode_record(topic=TOPIC, queue_id=0, body=body_of(key, 100), properties=b"")
        size = 72 + 4 + len(record)
        log.append(
            seal_entry(
                [RecordBatch(record, np.array([len(record)], np.uint32), (Run(TOPIC, 0, 1),))],
                [offset],
                index=offset + 2,
                term=1,
                position=log.place(size),
                prev_chain=log.last_chain,
                store_time_ms=1_000,
                store_host=pack_host("127.0.0.1", 10911),
            )
        )
    log.flush()
    last = log.last_index
    log.close()
    return last


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Three equal logs of fifty messages and what clients recorded about them."""
    keys = [f"p0-{n}" for n in range(50)]
    last = 0
    for name in NODES:
        last = write_log(tmp_path / name / "store", keys)
    RecordedRun(
        topic=TOPIC,
        sent=[Sent(k, n * 10_000, n * 10_000 + 900, "stored", 0, n) for n, k in enumerate(keys)],
        delivered=[Found(0, n, key) for n, key in enumerate(keys)],
        seen=[Found(0, 3, "p0-3")],
        kills_us=[255_000],
        commit_index=last,
        nodes={name: f"{name}/store" for name in NODES},
    ).save(tmp_path)
    return tmp_path


def test_a_kept_run_is_checked_again(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--check", str(kept), "--output", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["acknowledged"] == printed["delivered"] == 50
    assert (printed["lost"], printed["duplicated"], printed["reordered"]) == (0, 0, 0)
    assert printed["failover_ms"] == pytest.approx(5.9)
    assert printed["replicas_equal"] is True


def test_a_log_without_one_acknowledged_message_exits_1(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"p0-{n}" for n in range(50) if n != 30]
    for name in NODES:
        for path in sorted((kept / name / "store").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        write_log(kept / name / "store", keys)
    assert main(["demo", "--check", str(kept), "--output", "json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["lost"] == 1
    assert printed["lost_keys"] == ["p0-30"]


def test_a_message_overwritten_in_one_log_exits_1(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = kept / "n1" / "store" / "commitlog" / f"{0:020}"
    data = segment.read_bytes()
    at = data.index(b"p0-20 ")
    segment.write_bytes(data[:at] + b"p0-99 " + data[at + 6 :])
    assert main(["demo", "--check", str(kept)]) == 1
    out = capsys.readouterr().out
    assert "n1: at byte" in out
    run = RecordedRun.load(kept)
    verdict, _ = check_run(run, kept)
    assert verdict.lost == 30
    assert not verdict.replicas_equal


def test_only_entries_up_to_the_commit_index_count(kept: Path) -> None:
    run = RecordedRun.load(kept)
    run.commit_index -= 1
    verdict, problems = check_run(run, kept)
    assert (verdict.lost_keys, problems) == (("p0-49",), [])


def test_a_log_that_ends_before_the_commit_index_is_not_equal(kept: Path) -> None:
    run = RecordedRun.load(kept)
    run.commit_index += 1
    verdict, problems = check_run(run, kept)
    assert not verdict.replicas_equal
    assert problems[0] == f"n0: ends before entry {run.commit_index}"


@pytest.mark.parametrize("content", [None, b"\xff\xff", b"\xa1\x65topic\x01"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.cbor").write_bytes(content)
    assert main(["demo", "--check", str(tmp_path)]) in (1, 2)
