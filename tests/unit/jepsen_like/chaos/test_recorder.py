"""A history survives its runner: what was flushed is there, once, and nothing is made up."""

from pathlib import Path

from dledger.jepsen_like.chaos.recorder import Recorder, read_run, write_rest
from dledger.jepsen_like.history.operation import (
    NEVER,
    Event,
    F,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)


def row(op_id: int) -> Operation:
    return Operation(op_id, op_id, 1, -1, F.SEND, Outcome.INFO, op_id, NEVER, "orders", 0)


def test_row_is_recorded_at_call_and_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history", RunHeader("r", 7, "{}"))
    first, second, fault = row(0), row(1), Event(5, 5, "kill", "leader", "n0")
    for item in (first, second):
        recorder.note(item)
    recorder.note(fault)
    recorder.write()
    history, torn = read_run(tmp_path)
    assert (history.header.seed, torn) == (7, 0)
    assert [op.outcome for op in history.operations] == [Outcome.INFO, Outcome.INFO]
    first.outcome, first.ret_ns, first.off = Outcome.OK, 9, 3
    fault.end_ns = 8
    recorder.note(first)
    recorder.note(fault, True)
    recorder.close()
    history, torn = read_run(tmp_path)
    assert [(op.op_id, op.outcome, op.off) for op in history.operations] == [
        (0, Outcome.OK, 3),
        (1, Outcome.INFO, -1),
    ]
    assert [(event.at_ns, event.end_ns) for event in history.events] == [(5, 8)]


def test_torn_last_row_is_reported(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history", RunHeader("r"))
    for number in range(3):
        recorder.note(row(number))
    recorder.close()
    file = tmp_path / "history" / "runner.cbor"
    file.write_bytes(file.read_bytes()[:-5])
    history, torn = read_run(tmp_path)
    assert [op.op_id for op in history.operations] == [0, 1]
    assert torn > 0


def test_what_replicas_held_stands_beside_the_rows(tmp_path: Path) -> None:
    Recorder(tmp_path / "history", RunHeader("r")).close()
    history, _ = read_run(tmp_path)
    history.replica_reads.append(ReplicaRead(1, "n0", "orders", 0, 0, (7, 8)))
    write_rest(tmp_path, history)
    again, _ = read_run(tmp_path)
    assert again.replica_reads == history.replica_reads
