"""Each guard: the defect of the consensus library it closes, shown by switching it off."""

import ast
import hashlib
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pysyncobj.syncobj
import pytest

from dledger.commitlog.errors import InvariantBroken, LocalProtocolError, RemoteProtocolError
from dledger.raft import settings as registry
from dledger.raft.journal import Proposal
from dledger.raft.library import LIBRARY_SHA256
from dledger.raft.peers import ContradictionError
from dledger.raft.settings import Guards
from dledger.raft.wire import Kind, PeerFrame
from tests.harness.guard_proofs import proves
from tests.harness.raft_cluster import Cluster, batch

REPOSITORY = Path(__file__).parents[4]


def ack(term: int, index: int) -> PeerFrame:
    return PeerFrame(Kind.APPEND_REPLY, term, 1, 1, [True, index], memoryview(b""))


@proves("durable_before_promise")
def test_an_entry_that_is_on_no_followers_disk_is_not_committed(
    guards: Guards, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    for follower in ("n1", "n2"):
        cluster.members[follower].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    assert cluster.node("n1").journal.last_index == index
    assert leader.commit_index == index - 1
    cluster.members["n1"].flush()
    cluster.run()
    assert leader.commit_index == index


@proves("durable_before_promise")
def test_leaders_own_copy_counts_only_when_it_is_on_disk(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    cluster.members["n0"].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    assert leader.replicator.peers["n1"].match_index == index
    assert leader.commit_index == index - 1
    cluster.members["n0"].flush()
    assert leader.commit_index == index


@proves("durable_before_promise")
def test_a_vote_leaves_only_when_it_is_on_disk(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    for voter in ("n1", "n2"):
        cluster.members[voter].flushes_by_itself = False
    cluster.clock.now_s += 10.0
    cluster.node("n0").begin_election()
    cluster.run()
    assert not cluster.node("n0").is_leader
    assert cluster.members["n1"].term_vote.voted_for == "n0"
    cluster.members["n1"].flush()
    cluster.run()
    assert cluster.node("n0").is_leader


@proves("envelope")
def test_ack_of_an_earlier_term_commits_nothing(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n0")
    cluster.elect("n1")
    leader = cluster.elect("n0")
    cluster.cut = {("n0", "n1"), ("n0", "n2"), ("n1", "n0"), ("n2", "n0")}
    index = cluster.append("n0", b"alone")
    cluster.members["n0"].flush()
    leader.receive("n1", ack(1, index))
    leader.settle()
    assert leader.commit_index == index - 1


@proves("idempotent_append")
def test_a_late_copy_of_an_append_cuts_nothing(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n0")
    cluster.append("n0", b"a")
    cluster.collect("n0")
    late = [letter for letter in cluster.post if letter.receiver == "n1"]
    cluster.run()
    for body in (b"b", b"c", b"d"):
        last = cluster.append("n0", body)
        cluster.run()
    cluster.heartbeat("n0")
    for letter in late:
        cluster.deliver(letter)
    assert cluster.node("n1").journal.last_index == last
    assert cluster.node("n1").commit_index == last


@proves("idempotent_append")
def test_follower_commits_only_what_it_has_verified(guards: Guards, tmp_path: Path) -> None:
    """n1 has an entry that no other member has; an empty append below it must not commit it."""
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n1")
    cluster.cut = {("n1", "n0"), ("n1", "n2")}
    mine = cluster.append("n1", b"mine alone")
    cluster.run()
    cluster.cut = {("n0", "n1"), ("n1", "n0"), ("n1", "n2"), ("n2", "n1")}
    cluster.elect("n0")
    cluster.cut = set()
    frame = PeerFrame(
        Kind.APPEND, cluster.node("n0").term, 1, 1, [mine - 1, 1, mine + 5], memoryview(b"")
    )
    cluster.node("n1").receive("n0", frame)
    cluster.members["n1"].flush()
    assert cluster.node("n1").commit_index <= mine - 1
    assert cluster.node("n1").journal.last_index == mine


@proves("next_index_never_back")
def test_pipelined_entries_travel_once(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    cluster.run()
    before = leader.replicator.peers["n1"].bytes_sent
    first = cluster.append("n0", bytes(500))
    cluster.collect("n0")
    second = cluster.append("n0", bytes(500))
    cluster.collect("n0")
    letters, cluster.post = cluster.post, []
    leader.receive("n1", ack(leader.term, first))
    leader.settle()
    cluster.collect("n0")
    cluster.post = letters + cluster.post
    cluster.run()
    sent = leader.replicator.peers["n1"].bytes_sent - before
    assert sent == sum(leader.journal.log.size_at(index) for index in (first, second))


@proves("one_vote_per_voter")
def test_one_voter_sent_twice_does_not_make_a_majority(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 5, guards=guards)
    node = cluster.node("n0")
    cluster.clock.now_s += 10.0
    node.begin_election()
    while not cluster.node("n1").term:
        cluster.step()
    for name in ("n0", "n1"):
        cluster.members[name].flush()
        cluster.collect(name)
    votes = [
        letter
        for letter in cluster.post
        if (letter.sender, letter.frame.kind) == ("n1", Kind.VOTE_REPLY)
    ]
    assert len(votes) == 1
    cluster.deliver(votes[0])
    cluster.deliver(votes[0])
    assert not node.is_leader


@proves("one_vote_per_voter")
def test_returning_member_does_not_depose_the_leader(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    cluster.cut = {("n0", "n2"), ("n1", "n2"), ("n2", "n0"), ("n2", "n1")}
    for _ in range(20):
        cluster.clock.now_s += 0.5
        cluster.heartbeat("n0")
        cluster.node("n2").begin_election()
        cluster.run()
    cluster.cut = set()
    cluster.heartbeat("n0")
    cluster.heartbeat("n0")
    assert leader.is_leader
    assert cluster.node("n2").leader_id == "n0"
    assert leader.term == 1


def test_member_with_a_higher_term_comes_back(cluster: Cluster) -> None:
    """Silence about lower terms would leave it outside without end (consensus.md, 10)."""
    cluster.elect("n0")
    cluster.node("n2").core.observe_term(142)
    cluster.heartbeat("n0")
    assert cluster.node("n0").term == 142
    cluster.clock.now_s += 10.0
    cluster.node("n1").begin_election()
    cluster.run()
    assert cluster.node("n1").term == 142
    cluster.elect("n1")
    cluster.append("n1", b"x")
    cluster.run()
    cluster.heartbeat("n1")
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1
    assert cluster.node("n2").commit_index == cluster.node("n1").commit_index


@proves("commit_restored_clamped")
def test_restored_commit_index_never_runs_ahead_of_the_log(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n0")
    cluster.append("n0", b"x")
    cluster.run()
    cluster.members["n0"].log.close()
    member = cluster.start("n0", restored_commit_index=50)
    assert member.node.core.known_commit_index == member.log.last_index


@proves("leader_gives_up")
def test_leader_without_a_majority_steps_down(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    cluster.cut = {("n0", "n1"), ("n0", "n2"), ("n1", "n0"), ("n2", "n0")}
    cluster.clock.now_s += leader.settings.election_timeout_s * 1.05
    cluster.heartbeat("n0")
    leader.settle()
    assert not leader.is_leader


@proves("never_forwarded")
def test_a_command_from_a_peer_is_refused(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n0")
    for kind in ("apply_command", "apply_command_response", "status"):
        with pytest.raises(RemoteProtocolError):
            cluster.node("n0").core.step(
                "n1", {"type": kind, "command": b"", "request_id": 1, "error": None}
            )


UNPICKLED: list[str] = []


def explode(text: str) -> None:
    UNPICKLED.append(text)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return explode, ("boom",)


@proves("no_pickle")
def test_a_pickle_from_a_peer_is_never_opened(guards: Guards, tmp_path: Path) -> None:
    UNPICKLED.clear()
    cluster = Cluster(tmp_path, guards=guards)
    cluster.elect("n0")
    core = cluster.node("n1").core
    message = {"type": "append_entries", "term": core.term, "commit_index": 0}
    place = {"prevLogIdx": 1, "prevLogTerm": 1}
    parts = [("start", b""), ("finish", pickle.dumps(Bomb()))]
    for transmission, data in parts:
        with suppress(RemoteProtocolError, TypeError):
            core.step("n0", {**message, **place, "transmission": transmission, "data": data})
    assert UNPICKLED == []


@proves("lazy_ranges")
def test_a_range_of_the_log_costs_nothing_until_it_is_read(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, guards=guards)
    cluster.elect("n0")
    for number in range(200):
        cluster.append("n0", str(number).encode())
    cluster.members["n0"].flush()
    journal = cluster.node("n0").journal
    reads = 0
    item = journal.item

    def counted(index: int) -> tuple[bytes, int, int]:
        nonlocal reads
        reads += 1
        return item(index)

    journal.item = counted  # type: ignore[method-assign] # counts reads of this one journal
    assert len(journal[1:]) == journal.last_index
    assert journal[1:][5:][0][1] == 6
    assert reads == 1


def test_a_range_dies_with_the_truncation_that_outdates_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    cluster.elect("n0")
    node = cluster.node("n0")
    journal = node.journal
    index = node.append(Proposal([batch(b"x")], [0], 0))
    held = journal[1:]
    journal.deleteEntriesFrom(index)
    with pytest.raises(InvariantBroken, match="after the log was truncated"):
        held[0]


@proves("entry_size_capped")
def test_an_entry_above_the_cap_is_refused_before_it_is_appended(
    guards: Guards, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, 1, guards=guards)
    node = cluster.elect("n0")
    node.settings = replace(node.settings, entry_bytes_max=1000)
    last = node.journal.last_index
    with pytest.raises(LocalProtocolError, match="above the cap"):
        node.append(Proposal([batch(bytes(2000))], [0], 0))
    assert node.journal.last_index == last


@proves("no_library_dump")
def test_the_librarys_dumps_are_never_loaded(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, guards=guards)
    library: Any = cluster.node("n0").core._library
    with pytest.raises(InvariantBroken, match="tried to load a dump"):
        library._SyncObj__loadDumpFile(clearJournal=False)


# -- the registry itself -------------------------------------------------------------------


def guard_marks() -> dict[str, list[str]]:
    """Return the guards that tests claim to prove, read from the sources."""
    found: dict[str, list[str]] = {}
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "@proves(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    match decorator:
                        case ast.Call(func=ast.Name(id="proves"), args=[ast.Constant(value=name)]):
                            found.setdefault(str(name), []).append(node.name)
    return found


def test_every_guard_has_a_proof_and_every_proof_a_guard() -> None:
    assert set(guard_marks()) == set(registry.names())


def test_the_registry_equals_the_table_in_the_documentation() -> None:
    text = (REPOSITORY / "docs" / "internals" / "consensus.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    assert table == {name: registry.closes(name) for name in registry.names()}


def test_no_setting_reaches_the_switches() -> None:
    uses = [
        path.relative_to(REPOSITORY).as_posix()
        for package in ("dledger", "namesrv", "client", "remoting")
        for path in (REPOSITORY / package).rglob("*.py")
        if "Guards(" in path.read_text() and path.parts[-2:] != ("raft", "settings.py")
    ]
    assert uses == []


def test_library_is_the_version_of_the_overrides() -> None:
    source = Path(pysyncobj.syncobj.__file__).read_bytes()
    assert hashlib.sha256(source).hexdigest() == LIBRARY_SHA256


def test_second_leader_of_one_term_is_refused(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    beat = PeerFrame(Kind.HEARTBEAT, leader.term, 1, 1, [1, 0], memoryview(b""))
    cluster.node("n1").receive("n0", beat)
    with pytest.raises(ContradictionError, match="n2 and n0 both lead term 1"):
        cluster.node("n1").receive("n2", beat)
    with pytest.raises(ContradictionError, match="n2 and n0 both lead term 1"):
        leader.receive("n2", beat)
