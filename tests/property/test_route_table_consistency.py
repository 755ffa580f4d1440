"""Any history of registrations leaves the route tables whole and equal to a naive model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.name_server import RouteCache
from dledger.namesrv.registration import HOLDER_SILENCE_MS, Registration
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import DataVersion, QueueData, TopicConfig
from dledger.remoting.protocol.fastjson import Dialect

EXPIRY_MS = 100
TOPICS = ("T1", "T2", "T3", "T4")

clusters = st.sampled_from(["c1", "c2"])
names = st.sampled_from(["a", "b", "c"])
addrs = st.sampled_from(["h:1", "h:2", "h:3", "h:4"])
ids = st.integers(0, 2)
connections = st.integers(1, 3)
topic_sets = st.sets(st.sampled_from(TOPICS), max_size=4)
filter_lists = st.lists(st.sampled_from(["f:1", "f:2"]), max_size=2, unique=True)


@dataclass
class Node:
    """One registered address, by the model."""

    name: str
    broker_id: int
    state: int
    counter: int
    seen_ms: int
    timeout_ms: int
    connection: int
    filters: tuple[str, ...]


@dataclass
class Model:
    """Addresses and the queues of each name; everything else is computed again."""

    nodes: dict[tuple[str, str], Node] = field(default_factory=dict)
    queues: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)

    def perm(self, name: str) -> int:
        return 4 if name in self.drained else 6

    def forget_drained(self) -> None:
        self.drained &= {node.name for node in self.nodes.values()}

    def cluster_of(self, name: str) -> str | None:
        return next((c for (c, _), node in self.nodes.items() if node.name == name), None)

    def holder(self, name: str, broker_id: int) -> tuple[str, str] | None:
        for key, node in self.nodes.items():
            if (node.name, node.broker_id) == (name, broker_id):
                return key
        return None

    def drop(self, key: tuple[str, str]) -> None:
        name = self.nodes.pop(key).name
        if self.cluster_of(name) is None:
            self.queues.pop(name, None)
        self.forget_drained()


class RouteTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.model = Model()

    @initialize(delete=st.booleans())
    def start(self, delete: bool) -> None:
        self.delete = delete
        self.table = RouteInfoManager(
            NamesrvTable(broker_expiry_ms=EXPIRY_MS, delete_topic_with_broker_registration=delete),
            on_route_change=self.routes_changed,
        )
        self.cache = RouteCache(self.table.route)

    def routes_changed(self, topics: Iterable[str]) -> None:
        self.cache.invalidate(topics)

    @rule(
        cluster=clusters,
        name=names,
        addr=addrs,
        broker_id=ids,
        connection=connections,
        topics=topic_sets,
        queues=st.integers(1, 2),
        state=st.integers(0, 2),
        counter=st.integers(0, 2),
        timeout=st.sampled_from([None, 30]),
        filters=filter_lists,
    )
    def register(
        self,
        cluster: str,
        name: str,
        addr: str,
        broker_id: int,
        connection: int,
        topics: set[str],
        queues: int,
        state: int,
        counter: int,
        timeout: int | None,
        filters: list[str],
    ) -> None:
        registration = Registration(
            cluster_name=cluster,
            broker_name=name,
            broker_addr=addr,
            broker_id=broker_id,
            topics={
                t: TopicConfig(topic_name=t, read_queue_nums=queues, write_queue_nums=queues)
                for t in sorted(topics)
            },
            data_version=DataVersion(state_version=state, counter=counter),
            heartbeat_timeout_ms=timeout,
            filter_servers=filters,
            connection=connection,
        )
        model, key = self.model, (cluster, addr)
        holder = model.holder(name, broker_id)
        refused = model.cluster_of(name) not in (None, cluster)
        ignored = (
            not refused
            and holder not in (None, key)
            and holder is not None
            and (
                model.nodes[holder].state > state
                or (
                    model.nodes[holder].state == state
                    and self.now_ms - model.nodes[holder].seen_ms <= HOLDER_SILENCE_MS
                )
            )
        )
        refused = refused or (not ignored and holder is None and len(topics) == 1)
        try:
            result = self.table.register_broker(registration, self.now_ms)
        except RegistrationRefusedError:
            assert refused
            return
        assert not refused
        assert result.superseded == ignored
        if ignored:
            return
        before = model.nodes.get(key)
        model.nodes[key] = Node(
            name,
            broker_id,
            state,
            counter,
            self.now_ms,
            timeout or EXPIRY_MS,
            connection,
            tuple(filters),
        )
        if before is not None and before.name != name and model.cluster_of(before.name) is None:
            model.queues.pop(before.name, None)
        if holder is not None and holder != key:
            model.nodes.pop(holder)
        model.forget_drained()
        changed = (
            holder != key or before is None or (before.state, before.counter) != (state, counter)
        )
        if broker_id == 0 and changed:
            mine = model.queues.setdefault(name, {})
            mine.update(dict.fromkeys(topics, (queues, model.perm(name))))
            if self.delete and len(topics) != 1:
                model.queues[name] = {t: q for t, q in mine.items() if t in topics}
        leader = model.holder(name, 0)
        assert result.master_addr == ("" if broker_id == 0 or leader is None else leader[1])

    @rule(cluster=clusters, name=names, addr=addrs)
    def unregister(self, cluster: str, name: str, addr: str) -> None:
        node = self.model.nodes.get((cluster, addr))
        known = node is not None and node.name == name
        assert self.table.unregister_broker(cluster, name, addr) == known
        if known:
            self.model.drop((cluster, addr))

    @rule(connection=connections)
    def disconnect(self, connection: int) -> None:
        gone = [k for k, node in self.model.nodes.items() if node.connection == connection]
        assert {tuple(i.key) for i in self.table.disconnect(connection)} == set(gone)
        for key in gone:
            self.model.drop(key)

    @rule(after_ms=st.integers(0, 60))
    def scan(self, after_ms: int) -> None:
        self.now_ms += after_ms
        gone = [
            key
            for key, node in self.model.nodes.items()
            if self.now_ms - node.seen_ms > node.timeout_ms
        ]
        assert {tuple(i.key) for i in self.table.scan(self.now_ms)} == set(gone)
        for key in gone:
            self.model.drop(key)

    @rule(cluster=clusters, addr=addrs)
    def heartbeat(self, cluster: str, addr: str) -> None:
        node = self.model.nodes.get((cluster, addr))
        assert self.table.heartbeat(cluster, addr, self.now_ms) == (node is not None)
        if node is not None:
            node.seen_ms = self.now_ms

    @rule(topic=st.sampled_from(TOPICS), cluster=st.none() | clusters)
    def delete_topic(self, topic: str, cluster: str | None) -> None:
        self.table.delete_topic(topic, cluster)
        for name, mine in self.model.queues.items():
            if cluster is None or self.model.cluster_of(name) == cluster:
                mine.pop(topic, None)

    @rule(topic=st.sampled_from(TOPICS), name=names)
    def register_topic(self, topic: str, name: str) -> None:
        data = QueueData(broker_name=name, read_queue_nums=9, write_queue_nums=9)
        known = self.model.cluster_of(name) is not None
        assert self.table.register_topic(topic, [data]) == known
        if known:
            self.model.queues.setdefault(name, {})[topic] = (9, self.model.perm(name))

    @rule(name=names, write=st.booleans())
    def change_perm(self, name: str, write: bool) -> None:
        mine = self.model.queues.get(name, {})
        change = self.table.add_write_perm if write else self.table.wipe_write_perm
        if write:
            self.model.drained.discard(name)
        else:
            self.model.drained.add(name)
            self.model.forget_drained()
        assert change(name) == len(mine)
        for topic, (queues, _) in mine.items():
            mine[topic] = (queues, 6 if write else 4)

    @invariant()
    def tables_are_whole_and_equal_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        table, nodes = self.table, self.model.nodes
        by_name: dict[str, dict[int, str]] = {}
        in_cluster: dict[str, set[str]] = {}
        for (cluster, addr), node in nodes.items():
            by_name.setdefault(node.name, {})[node.broker_id] = addr
            in_cluster.setdefault(cluster, set()).add(node.name)
        assert {
            name: broker.broker_addrs for name, broker in table.broker_addr_table.items()
        } == by_name
        assert table.cluster_addr_table == in_cluster
        for name, broker in table.broker_addr_table.items():
            assert name in table.cluster_addr_table[broker.cluster]
        assert {
            tuple(key): (i.broker_name, i.connection, i.last_update_ms)
            for key, i in table.broker_live_table.items()
        } == {key: (n.name, n.connection, n.seen_ms) for key, n in nodes.items()}
        assert {tuple(k): v for k, v in table.filter_server_table.items()} == {
            key: node.filters for key, node in nodes.items() if node.filters
        }
        queues: dict[str, dict[str, tuple[int, int]]] = {}
        for name, mine in self.model.queues.items():
            for topic, data in mine.items():
                queues.setdefault(topic, {})[name] = data
        assert {
            topic: {name: (q.read_queue_nums, q.perm) for name, q in datas.items()}
            for topic, datas in table.topic_queue_table.items()
        } == queues

    @invariant()
    def cached_routes_are_the_routes_of_now(self) -> None:
        if not hasattr(self, "table"):
            return
        for topic in TOPICS:
            route = self.table.route(topic)
            fresh = None if route is None else route.encode(Dialect.STANDARD)
            assert self.cache.body(topic, Dialect.STANDARD) == fresh


TestRouteTable = RouteTableMachine.TestCase
