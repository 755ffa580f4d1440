"""The demo end to end, and that it notices what is wrong in a kept folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.history.operation import F, Outcome, encode_row

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


def overwrite(store: Path, value: int) -> None:
    """Change one byte of the record with the body of *value* in the log of a stopped broker."""
    wanted = value.to_bytes(8, "big")
    for segment in sorted((store / "commitlog").iterdir()):
        data = segment.read_bytes()
        if (at := data.find(wanted)) >= 0:
            segment.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            return
    raise AssertionError(f"no record holds {value}")


@pytest.mark.hunt
def test_demo_loses_nothing_and_finds_what_is_lost_later(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, facts = dledger("demo", "--keep", str(folder))
    assert code == 0, facts
    assert facts["acknowledged"] > 0
    assert facts["lost"] == facts["duplicated"] == facts["broken"] == 0
    assert facts["delivered"] >= facts["acknowledged"]
    assert facts["replicas_equal"] is True
    assert facts["kept"] is True
    assert {"queue_log", "total_queue", "replicas"} <= {*facts["checked"]}
    assert "nothing lost, nothing doubled" in Path(facts.pop("report")).read_text()

    for name in ("n0", "n1", "n2"):
        code, report = dledger("log", "verify", str(folder / "nodes" / name))
        assert (code, report["problems"]) == (0, [])
    code, again = dledger("demo", "--check", str(folder))
    assert (code, again) == (0, facts)

    # A record of an acknowledged send is damaged on one replica.
    history, _ = read_run(folder)
    acknowledged = [op for op in history.operations if op.f == F.SEND and op.outcome == Outcome.OK]
    overwrite(folder / "nodes" / "n1", acknowledged[len(acknowledged) // 2].value)
    code, facts = dledger("demo", "--check", str(folder))
    assert code == 1
    assert facts["replicas_equal"] is False
    assert any("n1" in violation["subject"] for violation in facts["violations"]), facts

    # Clients have an acknowledgement that no replica knows.
    invented = acknowledged[-1]
    invented.value += 1 << 20
    rows = folder / "history" / "runner.cbor"
    rows.write_bytes(rows.read_bytes() + encode_row(invented))
    code, facts = dledger("demo", "--check", str(folder))
    assert (code, facts["kept"]) == (1, False)
    assert facts["lost"] >= 1
