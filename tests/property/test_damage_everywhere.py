"""Damaged bytes against every decoder: each raises its own error, or reads what it can."""

import random
import zlib
from collections.abc import Callable
from typing import Any

import cbor2
import numpy as np
import pytest

from dledger.client.core.message_ext import MessageBlock
from dledger.commitlog.derive import derive_bulk, derive_plain
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry, verify_frame
from dledger.commitlog.errors import (
    ConfigError,
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    ForeignStoreError,
    InvariantBroken,
    MQError,
    RemoteProtocolError,
)
from dledger.commitlog.mark import Anchor, SlotFile, load_anchor
from dledger.commitlog.record import encode_record, iter_records, pack_host
from dledger.commitlog.record_batch import (
    BatchItem,
    decode_batch,
    encode_batch,
    verify_record_layout,
)
from dledger.commitlog.segment import LogFormat, check_format
from dledger.commitlog.store_paths import StorePaths
from dledger.namesrv.name_server import decode_kv_config, encode_kv_config
from dledger.processors.send_records import _runs_of, split_records
from dledger.raft.follower import split_frames
from dledger.raft.identity import Hello, Identity, check_owner
from dledger.raft.journal import TermVote
from dledger.raft.wire import Kind, PeerFrameDecoder, encode_frame, encode_head
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.bodies import (
    ClusterInfo,
    HeartbeatData,
    RegisterBrokerBody,
    ResetOffsetBody,
    TopicRouteData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import SerializeType, request
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.state.snapshot import load, snapshot
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    TopicsChange,
    decode_change,
    encode_change,
)
from dledger.state.tables import StateTables
from dledger.state.topics import TopicConfig
from dledger.testing.crash_disk import CrashDisk, Inode
from tests.harness.extent import examples

pytestmark = pytest.mark.slow

SEED = 20_261_121
ROOT = "/store"
PATHS = StorePaths(ROOT)
OWNER = {"cluster": "C", "group": "G", "name": "n0"}
RECORDS = [
    encode_record(topic="T1", queue_id=0, body=b"hello0", properties=b"TAGS\x01TagA\x02"),
    encode_record(topic="t" * 130, queue_id=1, body=b"b", properties=b"KEYS\x01a b"),
    encode_record(topic="T1", queue_id=0, body=b"", properties=b"", born_host=pack_host("::1", 1)),
]
BATCH = RecordBatch(
    b"".join(RECORDS),
    np.array([len(record) for record in RECORDS], np.uint32),
    (Run("T1", 0, 1), Run("t" * 130, 1, 1), Run("T1", 0, 1)),
)
FRAME = bytes(
    seal_entry(
        [BATCH],
        [0, 0, 1],
        index=1,
        term=1,
        position=0,
        prev_chain=0,
        store_time_ms=1,
        store_host=bytes(8),
    )
)
HEADER = parse_header(FRAME)
SENT_RECORDS = RECORDS[0] * 3


def read_frame(damaged: bytes) -> None:
    verify_frame(damaged, parse_header(damaged), 0)


def verify_sent(damaged: bytes) -> None:
    sizes = np.full(3, len(RECORDS[0]), np.uint32)
    verify_record_layout(damaged, sizes, (Run("T1", 0, 3),))


HELLO = Hello("C", "G", "n1", "ab" * 16, {"n0": "cd" * 16}, False, "h:1", "data")


def damaged(rng: random.Random, good: bytes) -> bytes:
    """Return *good* with one to three wounds; now and then with none that can be seen."""
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at : at + 4] = rng.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)])
            case 4:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case _ if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def resealed(wounded: bytes) -> bytes:
    """Return a peer frame with a length and CRC that fit what it has become."""
    content = wounded[8:]
    payload_at = 2 + int.from_bytes(content[:2], "big")
    crc = zlib.crc32(content[:payload_at], zlib.crc32(content[payload_at:]))
    return (len(content) + 4).to_bytes(4, "big") + crc.to_bytes(4, "big") + content


def read_peer_frames(data: bytes) -> None:
    for frame in PeerFrameDecoder().feed(data):
        if frame.kind in (Kind.HELLO, Kind.HELLO_ACK):
            Hello.decode(frame.fields[0])
        elif frame.kind is Kind.APPEND:
            read_append(frame.payload)


def read_append(payload: memoryview | bytes) -> None:
    for frame in split_frames(memoryview(payload)):
        verify_frame(frame.data, frame.header, 0)


def peer_frame(kind: Kind, *fields: Any, payload: bytes = b"") -> bytes:
    return encode_frame(encode_head(kind, 3, 7, 11, fields), [memoryview(payload)])


PEER_FRAMES = b"".join(
    [
        peer_frame(Kind.HELLO, HELLO.encode()),
        peer_frame(Kind.APPEND, 5, 2, 4, payload=FRAME),
        peer_frame(Kind.VOTE, 5, 2, False),
    ]
)


def disk_with(path: str, content: bytes) -> CrashDisk:
    disk = CrashDisk()
    disk.files[path] = Inode.holding(content)
    return disk


def written(act: Callable[[CrashDisk], object], path: str) -> bytes:
    disk = CrashDisk()
    act(disk)
    return disk.read(path)


def store_votes(disk: CrashDisk) -> None:
    slots = SlotFile(disk, PATHS.vote)
    for term in (7, 8):
        slots.store(cbor2.dumps([term, "n1"]))


SLOTS = written(store_votes, PATHS.vote)
IDENTITY = written(
    lambda disk: Identity(disk, PATHS.identity, **OWNER, rng=random.Random(1)), PATHS.identity
)
FORMAT = LogFormat(1 << 20, 1024)
TABLES = StateTables(applied_index=9)
TABLES.topics["T"] = TopicConfig("T", 4, 4, 6)
TABLES.consumer_offsets["g", "T"] = {0: 5, 1: 6}
TABLES.delay_progress[1] = 3


def read_tables(data: bytes) -> None:
    load(data)


def read_vote(data: bytes) -> None:
    TermVote(SlotFile(disk_with(PATHS.vote, data), PATHS.vote))


def read_identity(data: bytes) -> None:
    check_owner(disk_with(PATHS.identity, data), PATHS.identity, **OWNER)


def read_format(data: bytes) -> None:
    check_format(disk_with(PATHS.format, data), PATHS, FORMAT)


def read_anchor(data: bytes) -> None:
    load_anchor(disk_with("/anchor", data), "/anchor")


CHANGES = [
    encode_change(TopicsChange(put=(TopicConfig("T", 4, 4, 6),), delete=("U",))),
    encode_change(ConsumerOffsetsChange.of((("g", "T", 0, 5), ("g", "T", 1, 6)))),
    encode_change(DelayProgressChange(3, 0, 4)),
]


ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"h:1",2:"h:2"},"brokerName":"b","cluster":"C"}],'
    b'"filterServerTable":{},"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,'
    b'"topicSysFlag":0,"writeQueueNums":4}]}'
)
CLUSTER = (
    b'{"brokerAddrTable":{"b":{"brokerAddrs":{0:"h:1"},"brokerName":"b","cluster":"C"}},'
    b'"clusterAddrTable":{"C":["b"]}}'
)


def at_offset(record: bytes, queue_offset: int) -> bytes:
    return record[:20] + queue_offset.to_bytes(8, "big") + record[28:]


PULLED = b"".join(at_offset(record, offset) for offset, record in enumerate(RECORDS))


def read_block(data: bytes) -> None:
    for message in MessageBlock(data):
        _ = message.body, message.properties, message.tags, message.message_id


SENT = encode_command(
    request(
        RequestCode.SEND_RECORDS,
        {"group": "g", "runs": [["T", 0, 2], ["U", 1, 1]], "default_topic_queue_nums": 4},
        bytes(40),
        serialize=SerializeType.CBOR,
    )
)


HEARTBEAT = b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":1}]}'
COMMANDS = {
    kind: encode_command(
        request(
            RequestCode.SEND_MESSAGE_V2,
            SendMessageHeader("g", "T", "TBW102", 4, 0, 0, 1, 0, "TAGS\x01a\x02").encode_v2(),
            HEARTBEAT,
            serialize=kind,
        )
    )
    for kind in SerializeType
}


def read_command(data: bytes) -> None:
    for command in FrameDecoder().feed(data):
        SendMessageHeader.of(command)
        HeartbeatData.decode(command.body)


def read_sent(data: bytes) -> None:
    for command in FrameDecoder().feed(data):
        runs, _ = _runs_of(command)
        split_records(command, sum(run.count for run in runs))


BODIES: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "route": (ROUTE, TopicRouteData.decode),
    "cluster info": (CLUSTER, ClusterInfo.decode),
    "offset table": (
        b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"T"}:5}}',
        ResetOffsetBody.decode,
    ),
    "registration": (
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"topicName":"T","perm":6}},'
        b'"dataVersion":{"timestamp":1,"counter":2}},"filterServerList":[]}',
        RegisterBrokerBody.decode,
    ),
    "dialect": (b"""{a:{'b':[{"x":1L}]},c:{"$ref":"$.a.b[0]"},0:'y'}""", fastjson.loads),
}
Errors = tuple[type[MQError], ...]
DAMAGED = (CorruptRecordError, CorruptEntryError)
TABLE: dict[str, tuple[bytes, Callable[[bytes], object], Errors, int]] = {
    "records": (b"".join(RECORDS), lambda data: list(iter_records(data)), DAMAGED, 40_000),
    "entry frame": (FRAME, read_frame, DAMAGED, 30_000),
    "derive plain": (FRAME, lambda data: derive_plain(data, HEADER), DAMAGED, 10_000),
    "derive bulk": (FRAME, lambda data: derive_bulk(data, HEADER), DAMAGED, 10_000),
    "client batch": (SENT_RECORDS, verify_sent, DAMAGED, 10_000),
    "batch send": (encode_batch([BatchItem(b"abc", b"k\x01v")] * 3), decode_batch, DAMAGED, 10_000),
    "peer frame": (PEER_FRAMES, read_peer_frames, (RemoteProtocolError,), 20_000),
    "append": (FRAME * 2, read_append, (RemoteProtocolError, *DAMAGED), 10_000),
    "snapshot": (snapshot(TABLES), read_tables, (CorruptStoreError, ForeignStoreError), 8_000),
    "term and vote": (SLOTS, read_vote, (CorruptStoreError,), 4_000),
    "anchor": (Anchor(9, 4096, 2, 77, 5).encode(), read_anchor, (CorruptStoreError,), 5_000),
    "format": (FORMAT.encode(), read_format, (CorruptStoreError, ForeignStoreError), 5_000),
    "identity": (IDENTITY, read_identity, (CorruptStoreError, ForeignStoreError), 10_000),
    "key-value file": (
        encode_kv_config({"ORDER_TOPIC_CONFIG": {"T": "b:4"}}),
        decode_kv_config,
        (ConfigError,),
        5_000,
    ),
    **{name: (*row, (BadRequestError,), 10_000) for name, row in BODIES.items()},
    **{
        f"command {kind.name}": (
            command,
            read_command,
            (RemoteProtocolError, BadRequestError),
            20_000,
        )
        for kind, command in COMMANDS.items()
    },
    "pulled messages": (PULLED, read_block, (CorruptRecordError,), 10_000),
    "sent records": (SENT, read_sent, (RemoteProtocolError, BadRequestError), 10_000),
}


@pytest.mark.parametrize("name", TABLE)
def test_damage_raises_the_decoders_own_error_only(name: str) -> None:
    good, decode, errors, rounds = TABLE[name]
    decode(good)
    rng = random.Random(SEED)
    refused = 0
    rounds = examples(rounds)
    for _ in range(rounds):
        try:
            decode(damaged(rng, good))
        except errors:
            refused += 1
    assert refused > rounds // 10


@pytest.mark.parametrize(
    "good",
    [
        peer_frame(Kind.HELLO, HELLO.encode()),
        peer_frame(Kind.APPEND, 5, 2, 4, payload=FRAME),
        peer_frame(Kind.VOTE, 5, 2, False),
    ],
    ids=["hello", "append", "vote"],
)
def test_peer_frame_with_a_damaged_head_is_refused(good: bytes) -> None:
    rng = random.Random(SEED)
    refused = 0
    rounds = examples(10_000)
    for _ in range(rounds):
        try:
            read_peer_frames(resealed(damaged(rng, good)))
        except (RemoteProtocolError, *DAMAGED):
            refused += 1
    assert refused > rounds // 10


@pytest.mark.parametrize(("queue_id", "body"), CHANGES)
def test_a_damaged_state_record_stops_the_node_and_nothing_else(queue_id: int, body: bytes) -> None:
    rng = random.Random(SEED)
    refused = 0
    rounds = examples(7_000)
    for _ in range(rounds):
        try:
            decode_change(queue_id, damaged(rng, body))
        except InvariantBroken:
            refused += 1
    assert refused > rounds // 10
