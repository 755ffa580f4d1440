"""Any history of registrations leaves the route tables whole and equal to a naive model.

Addresses register under broker names, whole or by what changed, with identities and proofs that
may be another group's or copied; connections break, brokers fall silent, operators change what is
there. The model follows `docs/internals/protocol/semantics.md`, section 11, and the rules in front
of `dledger.namesrv.registration`. That groups keep their topics is left to the unit tests: topics
are open here.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.name_server import RouteCache
from dledger.namesrv.registration import HOLDER_SILENCE_MS, Registration
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import DataVersion, QueueData, TopicConfig
from dledger.remoting.protocol.fastjson import Dialect
from tests.harness.extent import examples

STEPS = 120
SEEDS = 150
CLUSTERS, NAMES = ("c1", "c2"), ("a", "b", "c")
ADDRS = ("h:1", "h:2", "h:3", "h:4")
TOPICS = ("T1", "T2", "T3", "T4")
OURS, THEIRS = "a" * 32, "b" * 32
EXPIRY_MS, SHORT_MS = 120_000, 60_000

Key = tuple[str, str]
"""Cluster and address."""


@dataclass
class Node:
    """One registered address."""

    name: str
    broker_id: int
    identity: str
    proof: str
    version: DataVersion
    seen_ms: int
    timeout_ms: int
    connection: int
    filters: tuple[str, ...]

    @property
    def weight(self) -> int:
        return bool(self.identity) + bool(self.identity and self.proof)


@dataclass
class Model:
    """Addresses and the queues of each name; everything else is computed again."""

    settings: NamesrvTable
    nodes: dict[Key, Node] = field(default_factory=dict)
    queues: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)

    def of(self, name: str) -> dict[Key, Node]:
        return {key: node for key, node in self.nodes.items() if node.name == name}

    def owner(self, name: str) -> str:
        return next((node.identity for node in self.of(name).values() if node.identity), "")

    def proof(self, name: str) -> str:
        return next((node.proof for node in self.of(name).values() if node.proof), "")

    def cluster_of(self, name: str) -> str | None:
        return next((cluster for cluster, _ in self.of(name)), None)

    def holder(self, name: str, broker_id: int) -> Key | None:
        return next((k for k, n in self.of(name).items() if n.broker_id == broker_id), None)

    def perm(self, name: str) -> int:
        return 4 if name in self.drained else 6

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            del self.nodes[key]
        names = {node.name for node in self.nodes.values()}
        self.queues = {name: mine for name, mine in self.queues.items() if name in names}
        self.drained &= names

    def refuses(self, one: Registration) -> bool:
        name, known = one.broker_name, self.nodes.get((one.cluster_name, one.broker_addr))
        owner = self.owner(name)
        if self.cluster_of(name) not in (None, one.cluster_name):
            return True
        if known and known.name != name and known.identity not in ("", one.identity):
            return True
        if one.identity == owner:
            return bool(owner) and self.proof(name) not in ("", one.proof)
        return bool(owner)

    def register(self, one: Registration, now_ms: int) -> str:
        """Take a registration in; return what becomes of it."""
        if self.refuses(one):
            return "refused"
        name, key = one.broker_name, (one.cluster_name, one.broker_addr)
        holder, known = self.holder(name, one.broker_id), self.nodes.get(key)
        new = Node(
            name, one.broker_id, one.identity, one.proof if one.identity else "",
            one.data_version, now_ms, one.heartbeat_timeout_ms or EXPIRY_MS,
            one.connection or 0, tuple(one.filter_servers),
        )  # fmt: skip
        if holder is not None and holder != key:
            held = self.nodes[holder]
            mine, theirs = new.version.state_version, held.version.state_version
            wins = mine > theirs or (mine == theirs and now_ms - held.seen_ms > HOLDER_SILENCE_MS)
            if new.weight < held.weight or (new.weight == held.weight and not wins):
                return "superseded"
        acting = self.settings.support_acting_master
        if one.since is not None and not (
            known and holder == key and known.version == one.since
            and not (acting and one.broker_id)
        ):  # fmt: skip
            return "needs all"
        if holder is None and len(one.topics) == 1:
            return "refused"
        changed = holder != key or known is None or known.version != one.data_version
        self.nodes[key] = new
        strangers = {
            each
            for each, node in self.of(name).items()
            if self.owner(name) and (not node.identity or (self.proof(name) and not node.proof))
        }
        self.remove(strangers | ({holder} if holder and holder != key else set()))
        lowest = min(node.broker_id for node in self.of(name).values())
        if changed and (one.broker_id == 0 or (acting and one.broker_id == lowest)):
            had = self.queues.get(name, {})
            new_ones = {t: (c.read_queue_nums, self.perm(name)) for t, c in one.topics.items()}
            gone = set[str]()
            if self.settings.delete_topic_with_broker_registration:
                gone = set(one.removed_topics)
                if one.since is None and len(one.topics) != 1:
                    gone = had.keys() - one.topics.keys()
            mine_now = {**had, **new_ones}
            self.queues[name] = {t: data for t, data in mine_now.items() if t not in gone}
        return "taken"


class Server:
    """A NameServer's tables with the cache in front, and what they have to be."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        settings = NamesrvTable(
            broker_expiry_ms=EXPIRY_MS,
            open_topics=True,
            support_acting_master=rng.random() < 0.5,
            delete_topic_with_broker_registration=rng.random() < 0.5,
        )
        self.table = RouteInfoManager(settings, on_route_change=self._changed)
        self.cache = RouteCache(self.table.route)
        self.model = Model(settings)
        self.identities = ("",) if seed % 3 == 0 else ("", OURS, OURS, OURS, THEIRS)
        self.now_ms = 0

    def _changed(self, topics: Iterable[str]) -> None:
        self.cache.invalidate(topics)

    def key(self) -> Key:
        return self.rng.choice(CLUSTERS[: self.rng.randint(1, 2)]), self.rng.choice(ADDRS)

    def version(self) -> DataVersion:
        return DataVersion(state_version=self.rng.randrange(4), counter=self.rng.randrange(3))

    def register(self) -> None:
        rng, (cluster, addr) = self.rng, self.key()
        known = self.model.nodes.get((cluster, addr))
        topics = {
            topic: TopicConfig(topic, read_queue_nums=count, write_queue_nums=count)
            for topic, count in ((topic, rng.randint(1, 2)) for topic in TOPICS)
            if rng.random() < 0.5
        }
        name, broker_id = rng.choice(NAMES), rng.randrange(3)
        identity, since = rng.choice(self.identities), None
        if known is not None and rng.random() < 0.5:  # as it is registered, by what has changed
            name, identity = known.name, known.identity
            broker_id = known.broker_id if rng.random() < 0.8 else broker_id
            since = known.version if rng.random() < 0.7 else self.version()
        removed = tuple(topic for topic in TOPICS if since and topic not in topics)
        one = Registration(
            cluster, name, addr, broker_id, topics, self.version(),
            heartbeat_timeout_ms=rng.choice([None, SHORT_MS]),
            filter_servers=[server for server in ("f:1", "f:2") if rng.random() < 0.3],
            enable_acting_master=rng.choice([None, True, False]),
            connection=rng.randint(1, 3),
            identity=identity,
            proof=rng.choice(["", "p" * 64, "p" * 64, "q" * 64]),
            since=since,
            removed_topics=removed[: rng.randint(0, 4)],
        )  # fmt: skip
        wanted = self.model.register(one, self.now_ms)
        try:
            result = self.table.register_broker(one, self.now_ms)
        except RegistrationRefusedError:
            found = "refused"
        else:
            named = {"superseded": result.superseded, "needs all": result.needs_all}
            found = next((what for what, holds in named.items() if holds), "taken")
            leader = self.model.holder(name, 0)
            if found == "taken":
                assert result.master_addr == (leader[1] if broker_id and leader else "")
        assert found == wanted, one

    def unregister(self) -> None:
        (cluster, addr), name = self.key(), self.rng.choice(NAMES)
        node, identity = self.model.nodes.get((cluster, addr)), self.rng.choice(self.identities)
        is_there = node is not None and node.name == name
        may = not (node and node.identity) or (node.identity == identity and not node.proof)
        try:
            assert self.table.unregister_broker(cluster, name, addr, identity=identity) == is_there
        except RegistrationRefusedError:
            assert is_there
            assert not may
        else:
            assert may or not is_there
            self.model.remove([(cluster, addr)] if is_there else ())

    def heartbeat(self) -> None:
        (cluster, addr), connection = self.key(), self.rng.randint(1, 3)
        node = self.model.nodes.get((cluster, addr))
        may = node is not None and (not node.identity or node.connection == connection)
        assert self.table.heartbeat(cluster, addr, self.now_ms, connection=connection) == may
        if node is not None and may:
            node.seen_ms = self.now_ms

    def disconnect(self) -> None:
        connection = self.rng.randint(1, 3)
        gone = {key for key, node in self.model.nodes.items() if node.connection == connection}
        assert {tuple(info.key) for info in self.table.disconnect(connection)} == gone
        self.model.remove(gone)

    def scan(self) -> None:
        self.now_ms += self.rng.choice([1, 1_000, 50_000, 130_000])
        silent = {
            key
            for key, node in self.model.nodes.items()
            if self.now_ms - node.seen_ms > node.timeout_ms
        }
        assert {tuple(info.key) for info in self.table.scan(self.now_ms)} == silent
        self.model.remove(silent)

    def delete_topic(self) -> None:
        topic, cluster = self.rng.choice(TOPICS), self.rng.choice([None, *CLUSTERS])
        self.table.delete_topic(topic, cluster)
        for name, mine in self.model.queues.items():
            if cluster is None or self.model.cluster_of(name) == cluster:
                mine.pop(topic, None)

    def register_topic(self) -> None:
        topic, name = self.rng.choice(TOPICS), self.rng.choice(NAMES)
        data = QueueData(broker_name=name, read_queue_nums=9, write_queue_nums=9)
        is_known = self.model.cluster_of(name) is not None
        try:
            assert self.table.register_topic(topic, [data]) == is_known
        except RegistrationRefusedError:
            assert self.model.owner(name)
        else:
            if is_known:
                self.model.queues.setdefault(name, {})[topic] = (9, self.model.perm(name))

    def change_perm(self) -> None:
        name = self.rng.choice(NAMES)
        mine = self.model.queues.get(name, {})
        if self.rng.random() < 0.5:
            assert self.table.add_write_perm(name) == len(mine)
            self.model.drained.discard(name)
        else:
            assert self.table.wipe_write_perm(name) == len(mine)
            self.model.drained |= {name} & {node.name for node in self.model.nodes.values()}
        for topic, (count, _) in mine.items():
            mine[topic] = (count, self.model.perm(name))

    def check(self) -> None:
        """The tables are the model's, and each answer that is kept is that of now."""
        table, model = self.table, self.model
        names = {node.name for node in model.nodes.values()}
        assert {name: broker.broker_addrs for name, broker in table.broker_addr_table.items()} == {
            name: {node.broker_id: addr for (_, addr), node in model.of(name).items()}
            for name in names
        }
        assert {n: broker.cluster for n, broker in table.broker_addr_table.items()} == {
            name: model.cluster_of(name) for name in names
        }
        in_cluster: dict[str, set[str]] = {}
        for (cluster, _), node in model.nodes.items():
            in_cluster.setdefault(cluster, set()).add(node.name)
        assert table.cluster_addr_table == in_cluster
        assert {
            tuple(key): (i.broker_name, i.connection, i.last_update_ms, i.identity, i.proof)
            for key, i in table.broker_live_table.items()
        } == {
            key: (n.name, n.connection, n.seen_ms, n.identity, n.proof)
            for key, n in model.nodes.items()
        }
        assert {tuple(key): servers for key, servers in table.filter_server_table.items()} == {
            key: node.filters for key, node in model.nodes.items() if node.filters
        }
        assert {
            (topic, name): (data.read_queue_nums, data.perm)
            for topic, queues in table.topic_queue_table.items()
            for name, data in queues.items()
        } == {(t, name): data for name, mine in model.queues.items() for t, data in mine.items()}
        assert all(table.topic_queue_table.values()), "no empty collection"
        assert table.drained == model.drained
        for topic in TOPICS:
            route = table.route(topic)
            for dialect in Dialect:
                fresh = None if route is None else route.encode(dialect)
                assert self.cache.body(topic, dialect) == fresh, topic
            owners = {name: model.owner(name) for name in table.topic_queue_table.get(topic, ())}
            assert table.stated_identities(topic) == {n: who for n, who in owners.items() if who}


@pytest.mark.parametrize("seed", range(examples(SEEDS)))
def test_groups_keep_their_names_and_routes(seed: int) -> None:
    server = Server(seed)
    acts = [server.register] * 12 + [server.unregister, server.heartbeat, server.disconnect]
    acts += [server.scan, server.delete_topic, server.register_topic, server.change_perm]
    for _ in range(STEPS):
        server.rng.choice(acts)()
        server.check()
