"""What a peer that is no member sends to the peer port changes nothing and ends no member."""

from pathlib import Path

import pytest
import trio

from dledger.commitlog.entry import seal_entry
from dledger.raft.wire import Kind
from tests.harness.groups import Groups
from tests.harness.raft_cluster import batch
from tests.harness.stranger import Stranger, frame, hello

HOST = "127.0.0.1"
ADDRESSES = {"n0": (HOST, 40911), "n1": (HOST, 40912), "n2": (HOST, 40913)}
IMPOSSIBLE = [
    "127.0.0.1:" + "9" * 19,
    "127.0.0.1:" + "9" * 5000,
    "x" * 300 + ":1",
    "a..b:1",
    "\ud7ff:1",
    "127.0.0.1:0",
    "127.0.0.1:65536",
    " :1",
]


@pytest.fixture
async def groups(tmp_path: Path, nursery: trio.Nursery) -> Groups:
    groups = Groups(tmp_path, nursery)
    for name in groups.names:
        await groups.start(name)
    await groups.leader()
    await trio.sleep(1)
    return groups


@pytest.fixture
def stranger(groups: Groups) -> Stranger:
    return Stranger(groups.network)


def standing(groups: Groups) -> dict[str, tuple[int, str | None, int]]:
    """Return term, leader and end of the log of every replica, as it sees them."""
    nodes = {name: replica.group.node for name, replica in groups.replicas.items()}
    return {name: (n.term, n.leader_id, n.journal.last_index) for name, n in nodes.items()}


async def still_acknowledges(groups: Groups) -> None:
    before = standing(groups)
    leader = await groups.leader()
    with trio.fail_after(20):
        await leader.group.submit(batch(b"after"))
    await trio.sleep(1)
    assert {name: now[:2] for name, now in standing(groups).items()} == {
        name: then[:2] for name, then in before.items()
    }


def others(groups: Groups) -> set[str]:
    """Return every name that any replica keeps anything of."""
    return {name for r in groups.replicas.values() for name in r.group.node.peers}


async def test_second_leader_of_the_same_term_is_ignored(
    groups: Groups, stranger: Stranger
) -> None:
    before = standing(groups)
    term = groups.replicas["n0"].group.node.term
    for address in ADDRESSES.values():
        await stranger.say(address, hello(), frame(Kind.HEARTBEAT, term, 1, 0))
    assert standing(groups) == before
    await still_acknowledges(groups)


async def test_terms_of_a_stranger_are_not_taken_over(groups: Groups, stranger: Stranger) -> None:
    before = standing(groups)
    for term in (2, 2**40, 2**62, 2**63 - 1, 2**200):
        for address in ADDRESSES.values():
            await stranger.say(address, hello(), frame(Kind.HEARTBEAT, term, 1, 0))
            await stranger.say(address, hello(), frame(Kind.VOTE, term, 2**30, 2**30, True))
    await trio.sleep(5)
    assert standing(groups) == before


async def test_addresses_that_cannot_be_looked_up_end_nothing(
    groups: Groups, stranger: Stranger
) -> None:
    before = standing(groups)
    for peer in IMPOSSIBLE:
        for address in ADDRESSES.values():
            assert await stranger.say(address, hello(peer=peer), seconds=3)
    assert standing(groups) == before
    assert others(groups) == set(ADDRESSES)


async def test_hello_of_another_group_or_version_gets_no_answer(
    groups: Groups, stranger: Stranger
) -> None:
    founded_elsewhere = {"voters": {"n9": "cd" * 16}}
    others = {"cluster": "another"}, {"group": "another"}, founded_elsewhere, {"v": 99}
    for answered, changes in ((1, {}), *((0, other) for other in others)):
        stranger.heard.clear()
        await stranger.say(ADDRESSES["n0"], hello(**changes), seconds=3)
        assert [heard.kind for heard in stranger.heard] == [Kind.HELLO_ACK] * answered


async def test_stranger_gets_no_entries_and_no_call(
    groups: Groups, stranger: Stranger, nursery: trio.Nursery
) -> None:
    leader = await groups.leader()
    await leader.group.submit(batch(b"a secret of the group"))
    nursery.start_soon(stranger.listen, HOST, 40999)
    for address in ADDRESSES.values():
        await stranger.say(address, hello(), frame(Kind.FETCH, 0, 1, 10**6), seconds=3)
    assert stranger.callers == 0
    assert b"a secret" not in b"".join(bytes(heard.payload) for heard in stranger.heard)


async def test_a_forged_message_is_not_stored(
    groups: Groups, stranger: Stranger, nursery: trio.Nursery
) -> None:
    nursery.start_soon(stranger.listen, HOST, 40999)
    before = standing(groups)
    node = groups.replicas["n0"].group.node
    last, term = node.journal.last_index, node.term + 5
    log = node.journal.log
    forged = seal_entry(
        [batch(b"FORGED by a stranger")],
        [0],
        index=last + 1,
        term=term,
        position=log.place(1000),
        prev_chain=log.last_chain,
        store_time_ms=log.last_store_time_ms,
        store_host=bytes(8),
    )
    for address in ADDRESSES.values():
        await stranger.say(
            address,
            hello(),
            frame(Kind.HEARTBEAT, term, 1, 0),
            frame(
                Kind.APPEND,
                term,
                last,
                node.journal.last_term,
                last + 1,
                sequence=2,
                payload=bytes(forged),
            ),
            seconds=3,
        )
    assert standing(groups) == before
    await still_acknowledges(groups)


async def test_names_of_strangers_are_not_kept(groups: Groups, stranger: Stranger) -> None:
    for number in range(100):
        await stranger.say(ADDRESSES["n0"], hello(f"s{number}"), seconds=0.01)
    await trio.sleep(3)
    assert others(groups) == set(ADDRESSES)


async def test_stranger_gets_no_names_and_no_incarnations(
    groups: Groups, stranger: Stranger
) -> None:
    incarnations = {r.group.node.identity.incarnation for r in groups.replicas.values()}
    for name in ("evil", "n1", "n2"):
        await stranger.say(ADDRESSES["n0"], hello(name), seconds=3)
    said = repr([heard.fields for heard in stranger.heard])
    assert not any(name in said for name in ("n1", "n2"))
    # RAFT_STATUS, which any client may ask for.
    said += repr([r.group.status() for r in groups.replicas.values()])
    assert not any(incarnation in said for incarnation in incarnations)
    await still_acknowledges(groups)


async def test_a_stranger_under_a_members_name_does_not_take_its_place(
    groups: Groups, stranger: Stranger
) -> None:
    before = standing(groups)
    leader = await groups.leader()
    for name in groups.names:
        for address in ADDRESSES.values():
            if ADDRESSES[name] != address:
                await stranger.say(address, hello(name), seconds=3)
    assert standing(groups) == before
    rows = leader.group.status()["peers"]
    assert all(row["connected"] and row["voter"] for row in rows.values())
    assert others(groups) == set(ADDRESSES)
    await still_acknowledges(groups)


async def test_unfinished_hellos_hold_little_memory(
    groups: Groups, stranger: Stranger, nursery: trio.Nursery
) -> None:
    """Two hundred that say half a hello: those that came first give way."""

    async def half() -> None:
        await stranger.say(ADDRESSES["n0"], hello()[:-5], seconds=10)

    for _ in range(200):
        nursery.start_soon(half)
    await trio.sleep(0.1)
    links = groups.replicas["n0"].group._links
    assert len(links._unproved) <= 64
    groups.replicas.pop("n2").kill()
    await groups.start("n2")
    await trio.sleep(1.5)
    leader = await groups.leader()
    assert leader.group.status()["peers"].keys() | {leader.name} == set(ADDRESSES)
    await still_acknowledges(groups)
