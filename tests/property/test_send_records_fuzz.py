"""What a client sends as SEND_RECORDS is refused or stored; the log is whole."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.entry import parse_header, record_sizes
from dledger.commitlog.record import encode_record, iter_records
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.extent import examples
from tests.harness.fake_group import FakeConnection, FakeGroup

RUNS: list[list[Any]] = [["T", 0, 3], ["T", 1, 2], ["U", 0, 1]]


def good_body() -> bytes:
    records = [
        encode_record(
            topic=topic,
            queue_id=queue_id,
            body=b"body %d" % i,
            properties=b"UNIQ_KEY\x01K\x02TAGS\x01A\x02",
        )
        for topic, queue_id, count in RUNS
        for i in range(count)
    ]
    return struct.pack(f">{len(records)}I", *map(len, records)) + b"".join(records)


BODY = good_body()

mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "double", "insert"]),
        st.integers(0, len(BODY) - 1),
        st.integers(0, 255),
    ),
    max_size=3,
)
scalars = st.one_of(
    st.integers(-3, 1 << 33), st.text(max_size=5), st.booleans(), st.binary(max_size=3)
)
odd_runs = st.one_of(
    st.just(RUNS), st.just(RUNS), st.lists(st.lists(scalars, max_size=4), max_size=4), scalars
)


def mutated(body: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    for kind, at, value in changes:
        at = min(at, max(0, len(body) - 1))
        if kind == "flip":
            body = body[:at] + bytes([value]) + body[at + 1 :]
        elif kind == "cut":
            body = body[:at]
        elif kind == "double":
            body = body[:at] + body[at : at + value] + body[at:]
        else:
            body = body[:at] + bytes([value]) + body[at:]
    return body


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(mutations, odd_runs), min_size=1, max_size=6))
def test_mutated_batches_are_refused_or_stored(attempts: list[tuple[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        group = FakeGroup(Path(folder), ManualClock())
        broker = Broker(group)
        broker.make_topic("T")
        for changes, runs in attempts:
            connection = FakeConnection()
            body = mutated(BODY, changes)
            command = request(RequestCode.SEND_RECORDS, {"group": "p", "runs": runs}, body)
            handled = broker.handle(command, connection)
            if handled is DEFERRED:
                group.settle()
                handled = connection.reply_
            assert isinstance(handled, RemotingCommand)
            if not changes and runs == RUNS:
                assert [code for code, *_ in handled.ext["results"]] == [0, 0, 0]
        for index in range(1, group.log.last_index + 1):
            frame = group.log.frame(index)
            header = parse_header(frame)
            records = list(iter_records(frame[header.body_start :]))
            assert len(records) == len(record_sizes(frame, header))
        group.close()
