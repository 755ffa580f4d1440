"""Which broker serves which topic: the five route tables and the rules that change them.

Sans-IO: nothing here waits, and time comes in as *now_ms*, milliseconds of a monotonic clock.
A broker address is in either all tables it belongs to or none. There is one way out, `_remove`,
taken by scan, unregistration, a broken connection and a takeover alike.

Spec: docs/internals/protocol/semantics.md, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.registration import (
    HEARTBEAT_TIMEOUT_MS_MAX,
    BrokerKey,
    BrokerLiveInfo,
    RefusedRegistrations,
    RegisterResult,
    Registration,
    check_limits,
    check_version,
    is_here,
    may_take,
    refuses_identity,
)
from dledger.raft.identity import GroupSecret
from dledger.remoting.protocol.bodies import (
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicRouteData,
    bad_topic_name,
    out_of_bounds,
)

MASTER_ID: Final = 0
PERM_READ: Final = 4
PERM_WRITE: Final = 2
UNIT_FLAG: Final = 1
UNIT_SUB_FLAG: Final = 2

MAX_TOPICS: Final = 1_000_000
"""Most topics over all brokers: about 1 GiB of tables, and far beyond what clients can poll."""


class RouteInfoManager:
    """The route tables of one NameServer.

    Args:
        settings: In force; replaced while it runs.
        on_route_change: Called with the topics whose route may have changed, within the change.
    Invariant: every address in ``broker_addr_table`` has one entry in ``broker_live_table`` and
        the other way round; every broker name in ``topic_queue_table``, ``cluster_addr_table``
        and ``drained`` is in ``broker_addr_table``; ``filter_server_table`` holds live addresses
        only; no table holds an empty collection.
    """

    def __init__(
        self,
        settings: NamesrvTable | None = None,
        *,
        on_route_change: Callable[[Iterable[str]], None] = lambda _topics: None,
    ) -> None:
        self.settings = NamesrvTable() if settings is None else settings
        self._on_route_change = on_route_change
        self.topic_queue_table: dict[str, dict[str, QueueData]] = {}
        self.broker_addr_table: dict[str, BrokerData] = {}
        self.cluster_addr_table: dict[str, set[str]] = {}
        self.broker_live_table: dict[BrokerKey, BrokerLiveInfo] = {}
        self.filter_server_table: dict[BrokerKey, tuple[str, ...]] = {}
        self.refused = RefusedRegistrations()
        self.secret: GroupSecret | None = None
        self.kept_out: set[str] = set()
        """Broker names that serve topics of other groups, and are in no route of these."""
        self.drained: set[str] = set()
        """Broker names whose topics take no messages, whatever their brokers register."""

    # Changes by brokers

    def register_broker(self, registration: Registration, now_ms: int) -> RegisterResult:
        """Enter a broker, or refresh it; for a follower return the leader's addresses.

        A topic that no client could read is left out of the route; the rest counts.

        Raises:
            RegistrationRefusedError: A name is empty, the broker name belongs to another cluster
                or another group, the address to another group, a single topic from a broker that
                is not known yet, a data version out of range, or a table is full. Nothing changed.
        Spec: docs/internals/protocol/semantics.md, section 11, rules 2 to 6.
        """
        name, broker_id, key = registration.broker_name, registration.broker_id, registration.key
        own_timeout_ms = registration.heartbeat_timeout_ms or 0
        if not (name and key.cluster_name and key.broker_addr):
            raise RegistrationRefusedError(
                "brokerName, brokerAddr and clusterName must not be empty"
            )
        broker = self.broker_addr_table.get(name)
        addrs = broker.broker_addrs if broker is not None else {}
        holder = addrs.get(broker_id)
        if broker is not None and broker.cluster != registration.cluster_name:
            raise RegistrationRefusedError(
                f"broker name {name} belongs to cluster {broker.cluster}, "
                f"not to {registration.cluster_name}"
            )
        known = self.broker_live_table.get(key)
        self._check_identity(registration, known)
        if holder is not None and holder != registration.broker_addr:
            held = self.broker_live_table[BrokerKey(key.cluster_name, holder)]
            silent_ms = now_ms - held.last_update_ms
            if not may_take(registration.claim, held.claim, silent_ms=silent_ms):
                return RegisterResult(superseded=True, kept_by=holder)
        if registration.since is not None and not self._follows(registration, holder, known):
            return RegisterResult(needs_all=True)
        if holder is None and len(registration.topics) == 1:
            raise RegistrationRefusedError("register broker failed")
        moved = holder != key.broker_addr
        is_same = known is not None and known.data_version == registration.data_version
        changed = moved or not is_same or name in self.kept_out
        if changed:
            check_limits(registration, self.broker_live_table)
            check_version(registration.data_version)

        if known is not None and known.broker_name != name:
            self._remove([key])
        if broker is None:
            broker = BrokerData(
                cluster=registration.cluster_name, broker_name=name, broker_addrs={}
            )
            self.broker_addr_table[name] = broker
            self.cluster_addr_table.setdefault(registration.cluster_name, set()).add(name)
        switched = broker.enable_acting_master != registration.enable_acting_master
        broker.enable_acting_master = registration.enable_acting_master
        addrs = broker.broker_addrs
        for old_id in [i for i, addr in addrs.items() if addr == key.broker_addr]:
            if old_id != broker_id:
                del addrs[old_id]
        addrs[broker_id] = key.broker_addr
        self.broker_live_table[key] = BrokerLiveInfo(
            key=key,
            broker_name=name,
            last_update_ms=now_ms,
            heartbeat_timeout_ms=min(own_timeout_ms, HEARTBEAT_TIMEOUT_MS_MAX)
            if own_timeout_ms > 0
            else self.settings.broker_expiry_ms,
            data_version=registration.data_version,
            ha_server_addr=registration.ha_server_addr,
            connection=registration.connection,
            identity=registration.identity,
            proof=registration.proof if registration.identity else "",
        )
        self._remove_strangers(broker)
        if moved and holder is not None:
            self._remove([BrokerKey(key.cluster_name, holder)])
        filters_changed = self._set_filter_servers(key, tuple(registration.filter_servers))

        left_out: tuple[tuple[str, str], ...] = ()
        if changed and self._owns_topics(broker, broker_id):
            left_out = self._update_topics(registration)
        if moved or filters_changed or switched:
            self._on_route_change(self._topics_of_brokers({name}))
        if broker_id == MASTER_ID:
            return RegisterResult(moved=moved, left_out=left_out)
        return replace(self._followers_result(broker, moved), left_out=left_out)

    def unregister_broker(
        self,
        cluster_name: str,
        broker_name: str,
        broker_addr: str,
        *,
        identity: str = "",
        connection: int | None = None,
    ) -> bool:
        """Remove an address; tell whether it was there under that broker name.

        The broker's id is not asked for: a deposed leader that stops still believes it is id 0.

        Raises RegistrationRefusedError: the address belongs to a group, and neither its identity
        nor the connection it registered over is the one that asks. Nothing changed.
        """
        key = BrokerKey(cluster_name, broker_addr)
        live = self.broker_live_table.get(key)
        if live is None or live.broker_name != broker_name:
            return False
        if not live.may_be_changed_by(identity, connection):
            raise RegistrationRefusedError(
                f"broker {broker_addr} belongs to the group {live.identity}, which alone may"
                " unregister it"
            )
        self._remove([key])
        return True

    def disconnect(self, connection: int) -> Sequence[BrokerLiveInfo]:
        """Remove and return the brokers whose last registration came over *connection*."""
        gone = [i for i in self.broker_live_table.values() if i.connection == connection]
        self._remove([info.key for info in gone])
        return gone

    def scan(self, now_ms: int) -> Sequence[BrokerLiveInfo]:
        """Remove and return the brokers that were silent for longer than they may be."""
        gone = [
            info
            for info in self.broker_live_table.values()
            if now_ms - info.last_update_ms > info.heartbeat_timeout_ms
        ]
        self._remove([info.key for info in gone])
        return gone

    def heartbeat(
        self,
        cluster_name: str,
        broker_addr: str,
        now_ms: int,
        *,
        identity: str = "",
        connection: int | None = None,
    ) -> bool:
        """Refresh a broker's liveness; tell whether it is known and the one that asks its own."""
        key = BrokerKey(cluster_name, broker_addr)
        live = self.broker_live_table.get(key)
        if live is None or not live.may_be_changed_by(identity, connection):
            return False
        self.broker_live_table[key] = replace(live, last_update_ms=now_ms)
        return True

    def query_data_version(
        self,
        cluster_name: str,
        broker_addr: str,
        version: DataVersion,
        now_ms: int,
        *,
        identity: str = "",
        connection: int | None = None,
    ) -> tuple[bool, DataVersion | None]:
        """Return whether *version* differs from the stored one, and the stored one.

        A broker that asks with the stored version is alive and is refreshed.
        """
        live = self.broker_live_table.get(BrokerKey(cluster_name, broker_addr))
        if live is None:
            return True, None
        if live.data_version != version or live.broker_name in self.kept_out:
            return True, live.data_version
        self.heartbeat(cluster_name, broker_addr, now_ms, identity=identity, connection=connection)
        return False, live.data_version

    # Changes by operators

    def wipe_write_perm(self, broker_name: str) -> int:
        """Take the write permission from a broker's topics and return how many it serves.

        It stays away while the broker is registered: also when another member leads, and for
        topics that are made or changed later.
        """
        if broker_name in self.broker_addr_table:
            self.drained.add(broker_name)
        return self._change_perm(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Give a broker's topics read and write permission and return how many it serves."""
        self.drained.discard(broker_name)
        return self._change_perm(broker_name, lambda perm: perm | PERM_READ | PERM_WRITE)

    def delete_topic(self, topic: str, cluster_name: str | None = None) -> None:
        """Remove a topic from the route, of one cluster's brokers or of all. Missing is fine.

        It stays away until a broker registers it in a changed topic table.
        """
        queues = self.topic_queue_table.get(topic)
        if queues is None:
            return
        names = set(queues) if cluster_name is None else self.brokers_of_cluster(cluster_name)
        self._drop_queues([topic], names)

    def register_topic(
        self, topic: str, queue_datas: Iterable[QueueData], *, connection: int | None = None
    ) -> bool:
        """Enter a topic on brokers that are registered; nothing changes if one is not.

        Raises RegistrationRefusedError: one of the brokers is of a group, and it is asked for over
        no connection of that group; a name or a number no client can read, or the table is full.
        """
        datas = {data.broker_name: data for data in queue_datas}
        if not datas or not datas.keys() <= self.broker_addr_table.keys():
            return False
        for name, data in datas.items():
            lives = self._lives(name)
            if not any(live.may_be_changed_by("", connection) for live in lives):
                raise RegistrationRefusedError(
                    f"broker name {name} belongs to a group, which alone enters its topics"
                )
            reason = bad_topic_name(topic) or out_of_bounds(data)
            reason = reason or self._kept_out_of(topic, name, self._owners(name))
            if reason:
                raise RegistrationRefusedError(f"topic {topic}: {reason}")
            if name in self.drained:
                datas[name] = structs.replace(data, perm=data.perm & ~PERM_WRITE)
        if topic not in self.topic_queue_table and len(self.topic_queue_table) >= MAX_TOPICS:
            raise RegistrationRefusedError(f"there are {MAX_TOPICS} topics already")
        self.topic_queue_table.setdefault(topic, {}).update(datas)
        self._on_route_change((topic,))
        return True

    # Questions

    def route(self, topic: str) -> TopicRouteData | None:
        """Return where *topic* is, without its ordered-topic configuration; None when nowhere."""
        queues = self.topic_queue_table.get(topic)
        if queues is None:
            return None
        brokers: list[BrokerData] = []
        queue_datas: list[QueueData] = []
        filter_servers: dict[str, list[str]] = {}
        for name, queue_data in sorted(queues.items()):
            broker = self.broker_addr_table[name]
            addrs = dict(sorted(broker.broker_addrs.items()))
            if self._has_acting_master(broker):
                addrs[MASTER_ID] = addrs.pop(next(iter(addrs)))
                queue_data = structs.replace(queue_data, perm=queue_data.perm & ~PERM_WRITE)
            brokers.append(
                BrokerData(
                    cluster=broker.cluster,
                    broker_name=name,
                    broker_addrs=addrs,
                    enable_acting_master=broker.enable_acting_master,
                )
            )
            queue_datas.append(queue_data)
            for addr in broker.broker_addrs.values():
                servers = self.filter_server_table.get(BrokerKey(broker.cluster, addr))
                if servers:
                    filter_servers[addr] = list(servers)
        return TopicRouteData(
            queue_datas=queue_datas, broker_datas=brokers, filter_server_table=filter_servers
        )

    def cluster_info(self) -> ClusterInfo:
        """Return all brokers and clusters."""
        return ClusterInfo(
            broker_addr_table=dict(self.broker_addr_table),
            cluster_addr_table={
                cluster: sorted(names) for cluster, names in self.cluster_addr_table.items()
            },
        )

    def member_group(self, cluster_name: str, broker_name: str) -> BrokerMemberGroup:
        """Return the addresses of one broker name; none when it is not in that cluster."""
        broker = self.broker_addr_table.get(broker_name)
        known = broker is not None and broker.cluster == cluster_name
        return BrokerMemberGroup(
            cluster=cluster_name,
            broker_name=broker_name,
            broker_addrs=dict(broker.broker_addrs) if broker is not None and known else {},
        )

    def brokers_of_cluster(self, cluster_name: str) -> set[str]:
        """Return the broker names of a cluster."""
        return set(self.cluster_addr_table.get(cluster_name, ()))

    def all_topics(self) -> list[str]:
        """Return every topic, sorted."""
        return sorted(self.topic_queue_table)

    def topics_of_cluster(self, cluster_name: str) -> list[str]:
        """Return the topics that a cluster's brokers serve, sorted."""
        return sorted(self._topics_of_brokers(self.brokers_of_cluster(cluster_name)))

    def system_topics(self) -> tuple[list[str], str]:
        """Return the names of clusters and brokers, which are topics too, and some address."""
        names = sorted({*self.cluster_addr_table, *self.broker_addr_table})
        return names, next((key.broker_addr for key in self.broker_live_table), "")

    def unit_topics(self, *, unit: bool | None, unit_sub: bool | None) -> list[str]:
        """Return topics by their unit flags, sorted; None asks for either."""
        found: list[str] = []
        for topic, queues in self.topic_queue_table.items():
            flags = next(iter(queues.values())).topic_sys_flag
            if unit in (None, bool(flags & UNIT_FLAG)) and unit_sub in (
                None,
                bool(flags & UNIT_SUB_FLAG),
            ):
                found.append(topic)
        return sorted(found)

    def identity_of(self, broker_name: str) -> str:
        """Return the identity of the group that a broker name belongs to; empty: to none."""
        return next((live.identity for live in self._lives(broker_name) if live.identity), "")

    def stated_identities(self, topic: str) -> dict[str, str]:
        """Return broker names of a topic that belong to an identity, and that identity."""
        owners = {
            name: self.identity_of(name) for name in sorted(self.topic_queue_table.get(topic, ()))
        }
        return {name: identity for name, identity in owners.items() if identity}

    # Inside

    def _lives(self, broker_name: str) -> list[BrokerLiveInfo]:
        broker = self.broker_addr_table.get(broker_name)
        if broker is None:
            return []
        return [
            self.broker_live_table[BrokerKey(broker.cluster, addr)]
            for addr in broker.broker_addrs.values()
        ]

    def _remove_strangers(self, broker: BrokerData) -> None:
        """Remove brokers that came before the name had an identity or a proof, and have none."""
        name = broker.broker_name
        if not self.identity_of(name):
            return
        proved = any(live.proof for live in self._lives(name))
        strangers = [
            live.key
            for live in self._lives(name)
            if not live.identity or (proved and not live.proof)
        ]
        if strangers:
            self._remove(strangers)

    def _check_identity(self, registration: Registration, known: BrokerLiveInfo | None) -> None:
        name, addr = registration.broker_name, registration.broker_addr
        if (
            known is not None
            and known.broker_name != name
            and known.identity not in ("", registration.identity)
        ):
            raise RegistrationRefusedError(
                f"broker {addr} belongs to the group {known.identity} under the name"
                f" {known.broker_name}"
            )
        owner = self.identity_of(name)
        proof = next((live.proof for live in self._lives(name) if live.proof), "")
        if self.secret is not None:
            owner = owner or registration.identity or "that has the secret of this NameServer"
            proof = self.secret.membership_proof(registration.identity)
        reason = refuses_identity(registration.claim, owner=owner, proof=proof)
        if reason:
            raise RegistrationRefusedError(f"broker name {name} is not for {addr}: {reason}")

    def _owners(self, name: str) -> set[str]:
        """Return the broker names whose topics no other broker name may serve, but for *name*.

        Without a secret any host may register. Groups of this machine alone share topics.
        """
        if self.secret is not None or self.settings.open_topics:
            return set()
        table = self.broker_addr_table
        here = {each for each in table if all(map(is_here, table[each].broker_addrs.values()))}
        others = table.keys() - {name} - (here if name in here else set())
        return {each for each in others if self.identity_of(each)}

    def _owns_topics(self, broker: BrokerData, broker_id: int) -> bool:
        if broker_id == MASTER_ID:
            return True
        return self.settings.support_acting_master and broker_id == min(broker.broker_addrs)

    def _has_acting_master(self, broker: BrokerData) -> bool:
        return (
            self.settings.support_acting_master
            and broker.enable_acting_master is True
            and MASTER_ID not in broker.broker_addrs
        )

    def _followers_result(self, broker: BrokerData, moved: bool) -> RegisterResult:
        master_addr = broker.broker_addrs.get(MASTER_ID)
        if master_addr is None:
            return RegisterResult(moved=moved)
        live = self.broker_live_table[BrokerKey(broker.cluster, master_addr)]
        return RegisterResult(live.ha_server_addr, master_addr, moved=moved)

    def _set_filter_servers(self, key: BrokerKey, servers: tuple[str, ...]) -> bool:
        if self.filter_server_table.get(key, ()) == servers:
            return False
        if servers:
            self.filter_server_table[key] = servers
        else:
            del self.filter_server_table[key]
        return True

    def _update_topics(self, registration: Registration) -> tuple[tuple[str, str], ...]:
        """Enter the topics of a leader; return those that no client could read."""
        name = registration.broker_name
        changed: list[str] = []
        left_out: dict[str, str] = {}
        allowed = ~PERM_WRITE if name in self.drained else ~0
        owners = self._owners(name)
        self.kept_out.discard(name)
        for topic, config in registration.topics.items():
            reason = bad_topic_name(topic) or out_of_bounds(config)
            if not reason and (why := self._kept_out_of(topic, name, owners)):
                self.kept_out.add(name)
                reason = why
            if topic not in self.topic_queue_table and len(self.topic_queue_table) >= MAX_TOPICS:
                reason = reason or f"there are {MAX_TOPICS} topics already"
            if reason:
                left_out[topic] = reason
                continue
            data = QueueData(
                broker_name=name,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=config.perm & allowed,
                topic_sys_flag=config.topic_sys_flag,
            )
            queues = self.topic_queue_table.setdefault(topic, {})
            if queues.get(name) != data:
                queues[name] = data
                changed.append(topic)
        if self.settings.delete_topic_with_broker_registration:
            self._drop_queues(self._gone(registration), {name})
        self._on_route_change(changed)
        return tuple(left_out.items())

    def _kept_out_of(self, topic: str, name: str, owners: Collection[str]) -> str:
        """Return why a broker name may not serve a topic that it does not serve yet."""
        queues = self.topic_queue_table.get(topic, {})
        owner = "" if name in queues else next((each for each in queues if each in owners), "")
        why = f"the group of {owner} serves it; set groupSecretFile here, or openTopics"
        return why if owner else ""

    def _follows(
        self, registration: Registration, holder: str | None, known: BrokerLiveInfo | None
    ) -> bool:
        """Whether differences begin where this address, under its id, stands here."""
        if known is None or holder != registration.broker_addr:
            return False
        if registration.broker_name in self.kept_out:
            return False  # what it is kept out of may be free now
        if self.settings.support_acting_master and registration.broker_id != MASTER_ID:
            return False  # whose topics count may have changed since
        return known.data_version == registration.since

    def _gone(self, registration: Registration) -> set[str]:
        """Return the topics that a broker had here and has no more."""
        if registration.since is not None:
            name, table = registration.broker_name, self.topic_queue_table
            return {topic for topic in registration.removed_topics if name in table.get(topic, ())}
        # A table of one topic is an addition, not all that the broker has.
        if len(registration.topics) == 1:
            return set()
        return self._topics_of_brokers({registration.broker_name}) - registration.topics.keys()

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        topics = self._topics_of_brokers({broker_name})
        for topic in topics:
            queues = self.topic_queue_table[topic]
            queues[broker_name] = structs.replace(
                queues[broker_name], perm=change(queues[broker_name].perm)
            )
        self._on_route_change(topics)
        return len(topics)

    def _topics_of_brokers(self, names: Collection[str]) -> set[str]:
        wanted = frozenset(names)
        return {
            topic
            for topic, queues in self.topic_queue_table.items()
            if not wanted.isdisjoint(queues)
        }

    def _drop_queues(self, topics: Iterable[str], names: Collection[str]) -> None:
        topics = list(topics)
        for topic in topics:
            queues = self.topic_queue_table[topic]
            for name in names:
                queues.pop(name, None)
            if not queues:
                del self.topic_queue_table[topic]
        self._on_route_change(topics)

    def _remove(self, keys: Collection[BrokerKey]) -> None:
        """Take addresses out of every table, and with the last one of a name its topics."""
        touched: set[str] = set()
        ended: set[str] = set()
        for key in keys:
            live = self.broker_live_table.pop(key)
            self.filter_server_table.pop(key, None)
            broker = self.broker_addr_table[live.broker_name]
            addrs = broker.broker_addrs
            for broker_id in [i for i, addr in addrs.items() if addr == key.broker_addr]:
                del addrs[broker_id]
            touched.add(live.broker_name)
            if not addrs:
                ended.add(live.broker_name)
                self.drained.discard(live.broker_name)
                self.kept_out.discard(live.broker_name)
                del self.broker_addr_table[live.broker_name]
                names = self.cluster_addr_table[key.cluster_name]
                names.discard(live.broker_name)
                if not names:
                    del self.cluster_addr_table[key.cluster_name]
        if not touched:
            return
        topics = self._topics_of_brokers(touched)
        if ended:
            self._drop_queues(topics, ended)
        else:
            self._on_route_change(topics)
