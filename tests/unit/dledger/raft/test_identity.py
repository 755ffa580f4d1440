"""Proofs of the group secret, and the identity of a group."""

import hashlib
import hmac
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest
import structlog.testing
import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import (
    ConfigError,
    CorruptStoreError,
    ForeignStoreError,
    RemoteProtocolError,
)
from dledger.raft.identity import GroupSecret, Hello, Identity, Side, check_nonce, owner_of
from dledger.raft.recover import Recovery
from dledger.raft.wire import (
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from dledger.testing.crash_disk import CrashDisk
from tests.harness.groups import Groups, running_groups
from tests.unit.dledger.raft.test_recover import lose_all_but_one

SECRET = b"0123456789abcdef"
DIALLER = {"name": "n1", "nonce": b"a" * 16}
ACCEPTOR = {"name": "n0", "nonce": b"b" * 16}


def test_proof_covers_every_field() -> None:
    said = cbor2.dumps(["dialler", DIALLER, ACCEPTOR, 7], canonical=True)
    expected = hmac.digest(SECRET, said, hashlib.sha256)
    assert GroupSecret(SECRET).proof(Side.DIALLER, DIALLER, ACCEPTOR, 7) == expected


@pytest.mark.parametrize(
    ("secret", "side", "dialler", "acceptor", "epoch"),
    [
        (b"another secret...", Side.DIALLER, DIALLER, ACCEPTOR, 7),
        (SECRET, Side.ACCEPTOR, DIALLER, ACCEPTOR, 7),
        (SECRET, Side.DIALLER, {**DIALLER, "name": "n2"}, ACCEPTOR, 7),
        (SECRET, Side.DIALLER, {**DIALLER, "nonce": b"c" * 16}, ACCEPTOR, 7),
        (SECRET, Side.DIALLER, DIALLER, {**ACCEPTOR, "nonce": b"c" * 16}, 7),
        (SECRET, Side.DIALLER, ACCEPTOR, DIALLER, 7),
        (SECRET, Side.DIALLER, DIALLER, ACCEPTOR, 8),
    ],
)
def test_a_proof_fits_nothing_else(
    secret: bytes, side: Side, dialler: dict[str, Any], acceptor: dict[str, Any], epoch: int
) -> None:
    proof = GroupSecret(secret).proof(side, dialler, acceptor, epoch)
    with pytest.raises(RemoteProtocolError, match="n1 does not prove that it knows the secret"):
        GroupSecret(SECRET).check(proof, Side.DIALLER, DIALLER, ACCEPTOR, 7, who="n1")


@pytest.mark.parametrize("proof", [None, "", b"", 7, b"\0" * 32], ids=repr)
def test_what_is_no_proof_is_refused(proof: object) -> None:
    with pytest.raises(RemoteProtocolError):
        GroupSecret(SECRET).check(proof, Side.DIALLER, DIALLER, ACCEPTOR, 7, who="n1")


@pytest.mark.parametrize("nonce", [None, b"", b"a" * 15, "a" * 16], ids=repr)
def test_member_without_a_secret_proves_nothing(nonce: object) -> None:
    with pytest.raises(RemoteProtocolError, match=r"raft\.secret_file"):
        check_nonce({"nonce": nonce}, "n1")


def test_a_short_secret_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ConfigError, match="15 bytes, at least 16") as raised:
        GroupSecret(SECRET[:15])
    assert "0123456789" not in str(raised.value)
    assert "0123456789" not in repr(GroupSecret(SECRET))


@pytest.fixture
def groups(tmp_path: Path, nursery: trio.Nursery) -> Groups:
    return Groups(tmp_path, nursery)


async def test_members_that_know_the_secret_are_a_group(groups: Groups) -> None:
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    for name in groups.names:
        await groups.start(name)
    leader = await groups.leader()
    await trio.sleep(2)
    rows = leader.group.status()["peers"]
    assert {name: row["connected"] for name, row in rows.items()} == dict.fromkeys(rows, True)
    assert len(rows) == 2


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, b"another secret..."])
async def test_member_without_the_secret_is_refused_by_name(
    groups: Groups, other: bytes | None
) -> None:
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    for name in groups.names:
        await groups.start(name)
    await groups.leader()
    await trio.sleep(1)
    groups.replicas.pop("n2").kill()
    groups.secrets.pop("n2")
    if other is not None:
        groups.secrets["n2"] = GroupSecret(other)
    with structlog.testing.capture_logs() as lines:
        stranger = await groups.start("n2")
        await trio.sleep(5)
    assert stranger.group.leadership is None
    assert not any(peer.is_connected for peer in stranger.group.node.peers.values())
    leader = await groups.leader(among=["n0", "n1"])
    assert leader.group.status()["peers"]["n2"]["connected"] is False
    refused = {line["error"] for line in lines if line["event"] == "peer_refused"}
    assert "n2 does not prove that it knows the secret of the group (raft.secret_file)" in refused


def frame(kind: Kind, said: object) -> bytes:
    return encode_frame(encode_head(kind, 0, 5, 0, (said,)))


async def answers(groups: Groups, *sent: bytes) -> list[PeerFrame]:
    """Send something to n0 as a stranger; return its frames before it closes."""
    decoder = PeerFrameDecoder()
    frames: list[PeerFrame] = []
    stream = await groups.network.connect("127.0.0.1", 40911, timeout_s=1)
    for data in sent:
        try:
            await stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            break
    with trio.move_on_after(20):
        while data := bytes(await stream.receive_some(65536)):
            frames += decoder.feed(data)
        return frames
    raise AssertionError("it did not hang up")


HELLO = Hello("C", "G", "n1", "ab" * 16, {}, False, "h:1", "data").encode()
WITH_NONCE = {**HELLO, "nonce": b"n" * 16}
CALLING = {**WITH_NONCE, "to": "n0"}
TOO_LARGE = encode_frame(
    encode_head(Kind.HELLO, 0, 5, 0, (WITH_NONCE,)), [memoryview(bytes(HELLO_BYTES_MAX))]
)
VOTE = encode_frame(encode_head(Kind.VOTE, 99, 5, 1, (9, 9, False)))


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ([frame(Kind.HELLO, HELLO), VOTE], 0),
        ([frame(Kind.HELLO, WITH_NONCE), VOTE], 0),
        ([frame(Kind.HELLO, CALLING), VOTE], 1),
        ([frame(Kind.HELLO, CALLING) + VOTE], 1),
        ([frame(Kind.HELLO, CALLING), frame(Kind.HELLO, {"proof": b"\0" * 32}), VOTE], 1),
        ([frame(Kind.HELLO, CALLING), frame(Kind.HELLO, {}), VOTE], 1),
        ([frame(Kind.HELLO, CALLING), frame(Kind.HELLO, "proof"), VOTE], 1),
        ([frame(Kind.HELLO, {**CALLING, "to": "n1"})], 0),
        ([frame(Kind.HELLO, {**CALLING, "to": 7})], 0),
        ([frame(Kind.HELLO, {**HELLO, "to": "n0"})], 0),
        ([TOO_LARGE], 0),
        ([frame(Kind.HELLO, CALLING)], 1),
    ],
)
async def test_stranger_changes_nothing(groups: Groups, sent: list[bytes], answered: int) -> None:
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    node = (await groups.start("n0")).group.node
    found = await answers(groups, *sent)
    assert [item.kind for item in found] == [Kind.HELLO_ACK] * answered
    # A number to prove oneself about, and nothing else: no name, and no proof to guess from.
    assert [sorted(item.fields[0]) for item in found] == [["nonce", "v"]] * answered
    assert node.term == 0
    assert node.peers["n1"].hello is None


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"nonce": b"m" * 16},
        {"nonce": b"m" * 16, "proof": b"\0" * 32},
        {"proof": b"\0" * 32},
        {"refused": True},
    ],
    ids=repr,
)
async def test_stranger_at_a_members_address_gets_nothing(
    groups: Groups, said: dict[str, object]
) -> None:
    """It answers with the right name and epoch, and proves nothing."""
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    listener = await groups.network_of("n1").listen("127.0.0.1", 40912)
    node = (await groups.start("n0")).group.node
    frames: list[PeerFrame] = []
    with trio.fail_after(30):
        stream = await listener.accept()
        decoder = PeerFrameDecoder()
        while not frames:
            frames += decoder.feed(bytes(await stream.receive_some(65536)))
        answer = {**HELLO, "channel": frames[0].fields[0]["channel"], **said}
        head = encode_head(Kind.HELLO_ACK, 0, frames[0].epoch, 0, (answer,))
        await stream.send_all(encode_frame(head))
        while data := bytes(await stream.receive_some(65536)):
            frames += decoder.feed(data)
    assert [item.kind for item in frames] == [Kind.HELLO]
    assert node.peers["n1"].hello is None
    assert not node.peers["n1"].is_connected


async def test_a_member_without_a_secret_draws_no_nonce(groups: Groups) -> None:
    """So runs that were recorded without one stay what they were."""
    await groups.start("n0")
    found = await answers(groups, frame(Kind.HELLO, HELLO), b"\0" * 8)
    assert [item.kind for item in found] == [Kind.HELLO_ACK]
    assert "nonce" not in found[0].fields[0]


async def test_member_proves_itself_and_asks_back(groups: Groups) -> None:
    """A stranger at the address of n1 gives a nonce and cannot go on."""
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    listener = await groups.network_of("n1").listen("127.0.0.1", 40912)
    node = (await groups.start("n0")).group.node
    heard: list[PeerFrame] = []
    with trio.fail_after(30):
        stream = await listener.accept()
        decoder = PeerFrameDecoder()
        while not heard:
            heard += decoder.feed(bytes(await stream.receive_some(65536)))
        epoch = heard[0].epoch
        for said in ({"v": PROTOCOL_VERSION, "nonce": b"m" * 16}, {**HELLO, "proof": b"\0" * 32}):
            await stream.send_all(encode_frame(encode_head(Kind.HELLO_ACK, 0, epoch, 0, (said,))))
        while data := bytes(await stream.receive_some(65536)):
            heard += decoder.feed(data)
    assert [sorted(item.fields[0]) for item in heard[1:]] == [["proof"]]
    assert heard[0].fields[0]["members"] == [0, []]
    assert node.peers["n1"].hello is None


async def test_the_proof_for_one_member_does_not_open_another(groups: Groups) -> None:
    """A stranger relays the frames of n1 to n0, byte for byte."""
    groups.secrets = {name: GroupSecret(SECRET) for name in groups.names}
    node = (await groups.start("n0")).group.node
    called = {**WITH_NONCE, "to": "n2"}
    said = {"v": PROTOCOL_VERSION, "nonce": b"x" * 16}
    proof = GroupSecret(SECRET).proof(Side.DIALLER, called, said, 5)
    found = await answers(groups, frame(Kind.HELLO, called), frame(Kind.HELLO, {"proof": proof}))
    assert found == []
    assert node.peers["n1"].hello is None


async def test_group_identity_survives_leaders_and_restarts(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        identity = leader.group.group_identity
        assert len(bytes.fromhex(identity)) == 16
        await groups.settle()
        assert {r.group.group_identity for r in groups.replicas.values()} == {identity}
        assert leader.group.status()["group_identity"] == identity
        (name,) = [name for name, replica in groups.replicas.items() if replica is leader]
        groups.replicas.pop(name).kill()
        assert (await groups.leader()).group.group_identity == identity
        await groups.start(name)
        await trio.sleep(5)
        assert groups.replicas[name].group.group_identity == identity


def test_two_groups_of_one_name_have_two_identities(tmp_path: Path) -> None:
    found = set()
    for seed in range(2):
        alone = Identity(
            OsDisk(),
            str(tmp_path / f"identity{seed}"),
            cluster="C",
            group="G",
            name="n0",
            rng=random.Random(seed),
        )
        assert alone.group_identity == ""
        assert alone.agree([], {})
        found.add(alone.group_identity)
    assert len(found) == 2


async def test_a_replica_that_goes_on_alone_is_another_group(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        before = (await groups.leader()).group.group_identity
        name = await lose_all_but_one(groups)
        recovery = Recovery(OsDisk(), str(tmp_path / name))
        recovery.go_on_alone(random.Random(1))
        recovery.close()
        await groups.start(name)
        after = (await groups.leader()).group.group_identity
        assert after not in ("", before)


async def test_members_of_a_secret_have_one_proof(tmp_path: Path) -> None:
    proofs = set()
    for secret in (b"a secret of sixteen bytes", b"another of sixteen bytes", None):
        async with running_groups(tmp_path / str(secret), size=1) as groups:
            group = (await groups.leader()).group
            if secret is not None:
                group.node.settings = replace(group.node.settings, secret=GroupSecret(secret))
            assert group.membership_proof == group.membership_proof
            proofs.add(group.membership_proof)
    assert sorted(map(len, proofs)) == [0, 64, 64]


def test_an_identity_with_a_flipped_bit_is_refused() -> None:
    disk, path = CrashDisk(), "/identity"
    Identity(disk, path, cluster="C", group="G", name="n0", rng=random.Random(1))
    content = disk.read(path)
    for at in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        disk.replace(path, flipped)
        with pytest.raises((CorruptStoreError, ForeignStoreError)):
            owner_of(disk, path)
    record = cbor2.loads(content)
    del record["crc"]
    disk.replace(path, cbor2.dumps(record, canonical=True))
    with pytest.raises(CorruptStoreError):
        owner_of(disk, path)
