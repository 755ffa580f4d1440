"""What a newer version wrote or sends is refused with one line, and left as it is."""

import random
import struct
import zlib
from collections.abc import Callable
from hashlib import blake2b

import cbor2
import pytest

from dledger.commitlog.errors import ForeignStoreError, NewerEntryError, RemoteProtocolError
from dledger.commitlog.mark import Anchor
from dledger.raft.follower import split_frames
from dledger.raft.identity import Hello, Identity, check_owner
from dledger.raft.membership import Members
from dledger.raft.wire import PROTOCOL_VERSION
from dledger.replica_records import InstallationRecord, Phase, encode_damage
from dledger.settings.tables import StoreTable
from dledger.state.snapshot import SNAPSHOT_FORMAT, snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_no_op

ROOT = "/memory"
RAFT = f"{ROOT}/raft"
SEGMENT_BYTES = 4096
OWNER = {"cluster": "C", "group": "G", "name": "n0"}
SETTINGS = StoreTable(path_root_dir=ROOT, mapped_file_size_commit_log=SEGMENT_BYTES)


def store_on(disk: CrashDisk) -> ReplicaStore:
    return ReplicaStore(disk, SETTINGS, StateTables)


def filled() -> CrashDisk:
    disk = CrashDisk()
    store = store_on(disk)
    for _ in range(3):
        store.log.append(next_no_op(store.log))
    Identity(disk, store.paths.identity, **OWNER, rng=random.Random(1))
    store.close(clean=True)
    return disk


def newer_snapshot() -> bytes:
    data = bytearray(snapshot(StateTables()))
    data[8:12] = (SNAPSHOT_FORMAT + 1).to_bytes(4, "big")
    return bytes(data)


def newer_entry(frame: bytes, prev_chain: int) -> bytes:
    """Return a whole entry of format 2."""
    changed = bytearray(frame)
    changed[38:40] = b"\0\2"
    body_crc = changed[56:60]
    chained = struct.pack(">Q", prev_chain) + changed[:48] + body_crc
    changed[48:56] = blake2b(chained, digest_size=8).digest()
    struct.pack_into(">I", changed, 64, zlib.crc32(changed[68:72], zlib.crc32(changed[:64])))
    return bytes(changed)


def spoil_format(disk: CrashDisk) -> None:
    path = f"{RAFT}/format"
    disk.replace(path, disk.read(path).replace(b'"format": 1', b'"format": 2'))


def spoil_anchor(disk: CrashDisk) -> None:
    body = bytearray(Anchor().encode()[:-4])
    body[4:8] = (2).to_bytes(4, "big")
    disk.replace(f"{RAFT}/anchor", bytes(body) + zlib.crc32(body).to_bytes(4, "big"))


def spoil_last_entry(disk: CrashDisk) -> None:
    store = store_on(disk)
    frame, chain = bytes(store.log.frame(3)), store.log.chain_at(2)
    store.close(clean=True)
    segment = disk.files[f"{ROOT}/commitlog/{0:020d}"]
    segment.content[144:216] = newer_entry(frame, chain)


def spoil_install(disk: CrashDisk) -> None:
    disk.replace(f"{RAFT}/install", newer_snapshot())
    InstallationRecord(disk, f"{RAFT}/installation").become(Phase.REFILLING)


def spoil_damage(disk: CrashDisk) -> None:
    body = cbor2.dumps({**cbor2.loads(encode_damage([(1, 1)])[4:]), "v": 2})
    disk.replace(f"{RAFT}/damage", zlib.crc32(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize(
    ("spoil", "version"),
    [
        (spoil_format, 2),
        (spoil_anchor, 2),
        (spoil_last_entry, 2),
        (spoil_damage, 2),
        (lambda disk: disk.replace(f"{RAFT}/snapshot", newer_snapshot()), SNAPSHOT_FORMAT + 1),
        (spoil_install, SNAPSHOT_FORMAT + 1),
    ],
    ids=["format", "anchor", "entry", "damage", "snapshot", "install"],
)
def test_folder_of_a_newer_version_is_refused(
    spoil: Callable[[CrashDisk], None], version: int
) -> None:
    disk = filled()
    spoil(disk)
    log_before = bytes(disk.files[f"{ROOT}/commitlog/{0:020d}"].content)
    with pytest.raises(ForeignStoreError, match=rf"(format|version) {version}\b") as refused:
        store_on(disk)
    message = str(refused.value)
    assert "\n" not in message
    assert ROOT in message
    assert "know" in message
    assert bytes(disk.files[f"{ROOT}/commitlog/{0:020d}"].content) == log_before


def test_an_identity_of_a_newer_version_is_refused() -> None:
    disk = filled()
    record = cbor2.loads(disk.read(f"{RAFT}/identity"))
    disk.replace(f"{RAFT}/identity", cbor2.dumps({**record, "v": 99}))
    with pytest.raises(ForeignStoreError, match="99"):
        check_owner(disk, f"{RAFT}/identity", **OWNER)


def test_a_hello_of_a_newer_version_is_refused() -> None:
    newer = PROTOCOL_VERSION + 1
    with pytest.raises(RemoteProtocolError, match=f"version {newer}, known here is"):
        Hello.decode({"v": newer, "anything": "else"})
    with pytest.raises(RemoteProtocolError, match=f"^n2 speaks version {newer}, known"):
        Hello.decode({"v": newer, "name": "n2"})
    with pytest.raises(RemoteProtocolError, match=r"^a peer speaks"):
        Hello.decode({"v": newer, "name": 1_000 * "x"})


def test_an_append_with_a_newer_entry_closes_the_connection() -> None:
    disk = filled()
    store = store_on(disk)
    frame = newer_entry(bytes(store.log.frame(1)), 0)
    with pytest.raises(RemoteProtocolError, match="format 2"):
        split_frames(memoryview(frame))
    with pytest.raises(NewerEntryError, match="format 2"):
        store.log.append(frame)
    store.close(clean=False)


def test_a_list_of_members_of_a_newer_version_is_refused() -> None:
    with pytest.raises(Exception, match="version 3; known here is 1"):
        Members.decode(cbor2.dumps({"v": 3, "members": []}))
