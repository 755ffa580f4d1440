"""A run kept in a folder: what clients recorded, as CBOR, beside the brokers' data folders.

::

    run.cbor        what was sent, delivered and seen, kills, nodes, commit index
    n0/store …      data folders of the stopped brokers
    n0.log …        what they logged
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cbor2
import msgspec

from commitlog.entry import record_sizes
from commitlog.errors import CorruptRecordError
from commitlog.record import decode_record
from dledger.cli.demo_check import Found, Sent, Verdict, check, key_in
from dledger.cli.log_walk import LogDamageError, Segment, equal_bytes, open_segments, walk
from dledger.cli.output import CliError, ExitCode

RUN_FILE = "run.cbor"
FORMAT = 1


class RecordedRun(msgspec.Struct, kw_only=True):
    """Everything the checker needs besides the data folders."""

    format: int = FORMAT
    topic: str
    sent: list[Sent] = []
    delivered: list[Found] = []
    seen: list[Found] = []
    kills_us: list[int] = []
    commit_index: int = 0
    """Committed and applied on every node when the load was over."""
    nodes: dict[str, str] = {}
    """Node to its data folder, relative to the run's."""

    def save(self, folder: Path) -> None:
        """Write it into the run's folder."""
        (folder / RUN_FILE).write_bytes(cbor2.dumps(msgspec.to_builtins(self)))

    @classmethod
    def load(cls, folder: Path) -> RecordedRun:
        """Read it back.

        Raises:
            CliError: There is none, or it is not one; a usage error.
        """
        path = folder / RUN_FILE
        try:
            run: RecordedRun = msgspec.convert(cbor2.loads(path.read_bytes()), cls)
        except FileNotFoundError:
            raise CliError(
                f"{folder} holds no run: {RUN_FILE} is missing",
                next_step="make one with dledger demo --keep DIR",
                exit_code=ExitCode.USAGE,
            ) from None
        except (cbor2.CBORDecodeError, msgspec.ValidationError) as error:
            raise CliError(f"{path} is not a recorded run: {error}") from None
        if run.format != FORMAT:
            raise CliError(f"{path} has format {run.format}, this version reads {FORMAT}")
        return run


class LogContent(msgspec.Struct, kw_only=True):
    """What one replica's log holds up to the commit index."""

    segments: Any
    found: list[Found] = []
    chain: int = -1
    """Chain at the commit index; -1 when the log does not reach it undamaged."""
    end_position: int = 0
    damage: str = ""


def read_log(store: Path, topic: str, commit_index: int) -> LogContent:
    """Return the messages of *topic* in the log of a stopped broker, up to *commit_index*.

    Damage ends the log; what stands before it counts.
    """
    content = LogContent(segments=[])
    wanted = topic.encode()
    try:
        content.segments = open_segments(store / "commitlog")
        for entry in walk(content.segments):
            if entry.header.index > commit_index:
                break
            start = entry.header.body_start
            # Most entries hold our topic alone or none of it.
            if entry.header.record_count and wanted in bytes(entry.frame):
                for size in record_sizes(entry.frame, entry.header).tolist():
                    record = decode_record(entry.frame, start)
                    if record.topic == topic:
                        key = key_in(bytes(record.body)) or ""
                        content.found.append(Found(record.queue_id, record.queue_offset, key))
                    start += size
            content.end_position = entry.header.end_position
            if entry.header.index == commit_index:
                content.chain = entry.header.chain
        else:
            if content.chain < 0:
                content.damage = f"ends before entry {commit_index}"
    except (LogDamageError, CorruptRecordError, OSError) as error:
        content.damage = str(error)
    return content


def check_run(run: RecordedRun, folder: Path) -> tuple[Verdict, list[str]]:
    """Return the verdict over a recorded run and its data folders, and what is wrong with them.

    The brokers must have been stopped.
    """
    contents: dict[str, LogContent] = {}
    for name, store in sorted(run.nodes.items()):
        contents[name] = read_log(folder / store, run.topic, run.commit_index)
    problems = [f"{name}: {content.damage}" for name, content in contents.items() if content.damage]
    problems += _differences(contents)
    verdict = check(
        run.sent,
        run.delivered,
        seen_earlier=run.seen,
        logs={name: content.found for name, content in contents.items()},
        kills_us=run.kills_us,
        replicas_equal=not problems,
    )
    return verdict, problems


def _differences(contents: dict[str, LogContent]) -> list[str]:
    """Compare chain and bytes of every log with those of the first."""
    problems: list[str] = []
    names = list(contents)
    for name in names[1:]:
        first, other = contents[names[0]], contents[name]
        if first.damage or other.damage:
            continue
        if first.chain != other.chain or first.end_position != other.end_position:
            problems.append(f"{name} and {names[0]} have different chains at the same entry")
        left: list[Segment] = first.segments
        right: list[Segment] = other.segments
        at = equal_bytes(left, right, first.end_position)
        if at is not None:
            problems.append(f"{name} and {names[0]} differ at byte {at}")
    return problems
