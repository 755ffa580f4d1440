"""Groups with identities, proofs and differences at two NameServers that see different histories.

A group of three registers at both, by what changed where it may; answers get lost, registrations
come late, NameServers forget all. Strangers want its name with other identities, with none, and
with a copied one. The model follows `docs/internals/protocol/semantics.md`, section 11, and the
rules in front of `dledger.namesrv.registration`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.name_server import RouteCache
from dledger.namesrv.registration import HOLDER_SILENCE_MS, Registration
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import DataVersion, TopicConfig
from dledger.remoting.protocol.fastjson import Dialect
from tests.harness.extent import examples

STEPS = 120
SEEDS = 60
NAME, CLUSTER = "a", "c"
OURS, THEIRS = "a" * 32, "b" * 32
MEMBERS = ("h:1", "h:2", "h:3")
STRANGERS = ("s:1", "s:2")
TOPICS = ("T1", "T2", "T3", "T4")
EXPIRY_MS = 120_000

Queues = dict[str, int]
"""Topic → number of queues."""


@dataclass
class Node:
    """One registered address."""

    broker_id: int
    identity: str
    proof: str
    version: DataVersion
    seen_ms: int

    @property
    def weight(self) -> int:
        return bool(self.identity) + bool(self.identity and self.proof)


@dataclass
class Expected:
    """What one NameServer has to know of the name, and what was registered there."""

    nodes: dict[str, Node] = field(default_factory=dict)
    topics: Queues = field(default_factory=dict)
    drained: bool = False

    @property
    def owner(self) -> str:
        return next((node.identity for node in self.nodes.values() if node.identity), "")

    @property
    def proof(self) -> str:
        return next((node.proof for node in self.nodes.values() if node.proof), "")

    def holder(self, broker_id: int) -> str | None:
        return next((a for a, node in self.nodes.items() if node.broker_id == broker_id), None)

    def remove(self, addr: str) -> None:
        self.nodes.pop(addr, None)
        if not self.nodes:
            self.topics, self.drained = {}, False

    def refuses(self, one: Registration) -> bool:
        if not self.owner:
            return False
        if one.identity == self.owner:
            return self.proof not in ("", one.proof)
        return True

    def register(self, one: Registration, now_ms: int, settings: NamesrvTable) -> str:
        """Take a registration in; return what becomes of it."""
        if self.refuses(one):
            return "refused"
        addr, holder = one.broker_addr, self.holder(one.broker_id)
        new = Node(
            one.broker_id, one.identity, one.proof if one.identity else "",
            one.data_version, now_ms,
        )  # fmt: skip
        known = self.nodes.get(addr)
        if holder not in (None, addr):
            held = self.nodes[str(holder)]
            mine, theirs = new.version.state_version, held.version.state_version
            wins = mine > theirs or (mine == theirs and now_ms - held.seen_ms > HOLDER_SILENCE_MS)
            if new.weight < held.weight or (new.weight == held.weight and not wins):
                return "superseded"
        if one.since is not None and not (
            known is not None
            and holder == addr
            and known.version == one.since
            and not (settings.support_acting_master and one.broker_id)
        ):
            return "needs all"
        if holder is None and len(one.topics) == 1:
            return "refused"
        changed = holder != addr or known is None or known.version != one.data_version
        if holder not in (None, addr):
            del self.nodes[str(holder)]
        self.nodes[addr] = new
        if self.owner:
            proved = self.proof
            for other, node in list(self.nodes.items()):
                if not node.identity or (proved and not node.proof):
                    del self.nodes[other]
        lowest = min(node.broker_id for node in self.nodes.values())
        leads = one.broker_id == 0 or (settings.support_acting_master and one.broker_id == lowest)
        if changed and leads:
            self.topics |= {name: config.read_queue_nums for name, config in one.topics.items()}
            if settings.delete_topic_with_broker_registration:
                gone = set(one.removed_topics)
                if one.since is None and len(one.topics) != 1:
                    gone = self.topics.keys() - one.topics.keys()
                self.topics = {k: v for k, v in self.topics.items() if k not in gone}
        return "taken"


class Server:
    """A NameServer's tables with the cache in front, and what they have to be."""

    def __init__(self, settings: NamesrvTable) -> None:
        self.table = RouteInfoManager(settings, on_route_change=self._changed)
        self.cache = RouteCache(self.table.route)
        self.expected = Expected()
        self.acknowledged: dict[str, tuple[DataVersion, Queues]] = {}
        """Member → the version, and the table, that it knows to be there."""

    def _changed(self, topics: Iterable[str]) -> None:
        self.cache.invalidate(topics)

    def register(self, one: Registration, now_ms: int) -> str:
        wanted = self.expected.register(one, now_ms, self.table.settings)
        try:
            result = self.table.register_broker(one, now_ms)
        except RegistrationRefusedError:
            found = "refused"
        else:
            found = (
                "superseded" if result.superseded else "needs all" if result.needs_all else "taken"
            )
        assert found == wanted, one
        return found

    def check(self) -> None:
        """The tables are the model's, and each answer that is kept is that of now."""
        table, expected = self.table, self.expected
        broker = table.broker_addr_table.get(NAME)
        assert (broker.broker_addrs if broker else {}) == {
            node.broker_id: addr for addr, node in expected.nodes.items()
        }
        assert {key.broker_addr: i.identity for key, i in table.broker_live_table.items()} == {
            addr: node.identity for addr, node in expected.nodes.items()
        }
        assert {
            topic: queues[NAME].read_queue_nums for topic, queues in table.topic_queue_table.items()
        } == expected.topics
        perms = {queues[NAME].perm for queues in table.topic_queue_table.values()}
        assert perms <= {4 if expected.drained else 6}
        for topic in TOPICS:
            route = table.route(topic)
            for dialect in Dialect:
                fresh = None if route is None else route.encode(dialect)
                assert self.cache.body(topic, dialect) == fresh, topic
        if expected.owner and expected.topics:
            topic = next(iter(expected.topics))
            assert table.stated_identities(topic) == {NAME: expected.owner}


class Groups:
    """A group of ours, strangers, and two NameServers."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = NamesrvTable(
            support_acting_master=rng.random() < 0.5,
            delete_topic_with_broker_registration=rng.random() < 0.5,
        )
        self.servers = [Server(self.settings), Server(self.settings)]
        self.now_ms = 0
        self.proof = rng.choice(["", "p" * 64])
        self.term, self.counter, self.leader = 1, 1, MEMBERS[0]
        self.topics: Queues = {"T1": 1, "T2": 1}
        self.late: list[tuple[int, Registration]] = []

    @property
    def version(self) -> DataVersion:
        return DataVersion(state_version=self.term, counter=self.counter)

    def registration(self, addr: str, server: Server) -> Registration:
        """Return how a member registers now: by what changed where it knows what is there."""
        rng = self.rng
        broker_id = 0 if addr == self.leader else 1 + MEMBERS.index(addr)
        known = server.acknowledged.get(addr)
        since, topics = None, self.topics
        removed: tuple[str, ...] = ()
        if known is not None and rng.random() < 0.8:
            since, had = known
            topics = {name: n for name, n in topics.items() if had.get(name) != n}
            removed = tuple(sorted(had.keys() - self.topics.keys()))
        return Registration(
            CLUSTER, NAME, addr, broker_id, tables_of(topics), self.version,
            enable_acting_master=rng.choice([None, True, False]),
            connection=MEMBERS.index(addr),
            identity=OURS,
            proof=self.proof,
            since=since, removed_topics=removed,
        )  # fmt: skip

    def register(self) -> None:
        """Let a member register at one NameServer; its answer may be lost, or it comes late."""
        addr, number = self.rng.choice(MEMBERS), self.rng.randrange(2)
        one = self.registration(addr, self.servers[number])
        fate = self.rng.random()
        if fate < 0.1:
            self.late.append((number, one))
            return
        self.deliver(number, one, is_lost=fate < 0.2)

    def deliver(self, number: int, one: Registration, *, is_lost: bool) -> None:
        server = self.servers[number]
        found = server.register(one, self.now_ms)
        if is_lost or one.broker_addr not in MEMBERS:
            return
        if found == "taken" and one.identity and one.data_version == self.version:
            server.acknowledged[one.broker_addr] = self.version, dict(self.topics)
        else:
            server.acknowledged.pop(one.broker_addr, None)

    def deliver_late(self) -> None:
        if self.late:
            number, one = self.late.pop(self.rng.randrange(len(self.late)))
            self.deliver(number, one, is_lost=True)

    def strange(self) -> None:
        """Let another broker want the name."""
        rng = self.rng
        one = Registration(
            CLUSTER, NAME, rng.choice([*STRANGERS, *MEMBERS]), rng.randrange(3),
            tables_of({t: 9 for t in TOPICS if rng.random() < 0.5}),
            DataVersion(state_version=rng.randrange(9), counter=rng.randrange(9)),
            connection=10 + rng.randrange(2),
            identity=rng.choice(["", OURS, THEIRS]),
            proof=rng.choice(["", "q" * 64]),
        )  # fmt: skip
        self.servers[rng.randrange(2)].register(one, self.now_ms)

    def change(self) -> None:
        """Change the topics, or the leader."""
        if self.rng.random() < 0.5:
            self.term += 1
            self.leader = self.rng.choice(MEMBERS)
        else:
            topic = self.rng.choice(TOPICS)
            if self.topics.pop(topic, None) is None or self.rng.random() < 0.5:
                self.topics[topic] = self.rng.randint(1, 3)
        self.counter += 1

    def lose(self) -> None:
        """Let a NameServer lose brokers, or all that it has."""
        number = self.rng.randrange(2)
        server, act = self.servers[number], self.rng.random()
        expected = server.expected
        if act < 0.2:
            self.servers[number] = Server(self.settings)
        elif act < 0.5:
            connection = self.rng.choice([0, 1, 2, 10, 11])
            for info in server.table.disconnect(connection):
                expected.remove(info.key.broker_addr)
                server.acknowledged.pop(info.key.broker_addr, None)
        else:
            self.now_ms += self.rng.choice([1_000, 50_000, 130_000])
            gone = {info.key.broker_addr for info in server.table.scan(self.now_ms)}
            silent = {
                addr
                for addr, node in expected.nodes.items()
                if self.now_ms - node.seen_ms > EXPIRY_MS
            }
            assert gone == silent
            for addr in gone:
                expected.remove(addr)

    def operate(self) -> None:
        """Let an operator change something at one NameServer."""
        server = self.servers[self.rng.randrange(2)]
        expected, act = server.expected, self.rng.random()
        if act < 0.4:
            assert server.table.wipe_write_perm(NAME) == len(expected.topics)
            expected.drained = bool(expected.nodes)
        elif act < 0.7:
            assert server.table.add_write_perm(NAME) == len(expected.topics)
            expected.drained = False
        else:
            topic = self.rng.choice(TOPICS)
            server.table.delete_topic(topic)
            expected.topics.pop(topic, None)


def tables_of(topics: Queues) -> dict[str, TopicConfig]:
    return {
        name: TopicConfig(name, read_queue_nums=count, write_queue_nums=count)
        for name, count in topics.items()
    }


@pytest.mark.parametrize("seed", range(examples(SEEDS)))
def test_groups_keep_their_names_and_routes(seed: int) -> None:
    groups = Groups(seed)
    acts = [groups.register] * 8 + [groups.deliver_late, groups.strange, groups.strange]
    acts += [groups.change, groups.change, groups.lose, groups.operate]
    for _ in range(STEPS):
        groups.rng.choice(acts)()
        for server in groups.servers:
            server.check()
