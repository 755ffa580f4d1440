"""What is demanded within a bound of a cluster that was left alone: due messages, routes, leaders.

`Steadiness` keeps since when a leader has served with a connected majority, and each broker with
each NameServer. Checked once a second of virtual time; a fault that comes and ends between two
checks shows in the incarnations of the nodes and in the clocks.

===================  =======================================================================
delay levels         `DueHeads`: the head of each level is delivered soon after it is due
timers               so is each message with a time of its own
transactions         so are the producers of an open half message asked; never sooner than a pause
                     after they were asked last, by the time that the log has
registered           `RouteWatch`: a member that a NameServer and the leader are long connected
                     with stands in its route; without a leader, one that lost its disk knows no
                     group
leader               where the leader has been connected for a while, the route names it
old leader           a route names no broker as leader that has not led for long
ended                nor a member whose process has ended, its connections closed with it
topics               a NameServer that the leader is connected with has its topics as they are now
answers              what a NameServer answers for a topic is what its tables have
redirected           `RedirectWatch`: after the refusal of a member that follows, a client takes
                     the leader for the leader, where that one has served, and the member has
                     been linked with it, for a few heartbeats
===================  =======================================================================

Due is what the date of the leader of now calls due, so that dates that differ raise no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.retry import FailureKind
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.jepsen_like.plans.promised import CHECKS_MAX
from dledger.jepsen_like.simulation.machine import Node
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld, NameServerNode
from dledger.jepsen_like.simulation.reference_replica import ReferenceReplica
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.fastjson import Dialect
from dledger.state.tables import StateTables
from dledger.state.transactions import OpenHalf, TransactionDecision

LOOK_S: Final = 1.0
"""Between two checks."""


class Steadiness:
    """What has not changed since when; times are those of the run.

    *served_since_s*: since when the leader of now has served steadily; None: none does.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._leader: tuple[Any, ...] = ()
        self._dates: list[tuple[int, float]] = []
        self._pairs: dict[tuple[str, str], tuple[tuple[Any, ...], float]] = {}
        self.served_since_s: float | None = None
        self.date_since_s = 0.0

    def look(self) -> BrokerNode | None:
        """Look; return the leader that serves steadily, None without one."""
        world, now_s = self._world, self._world.elapsed_s
        dates = [(node.clock_offset_ms, node.clock_drift_ppm) for node in world.brokers.values()]
        if dates != self._dates:
            self._dates, self.date_since_s = dates, now_s
        node = world.leader()
        if node is None or node.group is None or not self._is_served(node):
            self.served_since_s, self._leader = None, ()
            return None
        leader = (node.name, node.incarnation, node.group.term)
        if leader != self._leader:
            self.served_since_s, self._leader = now_s, leader
        return node

    def _is_served(self, node: BrokerNode) -> bool:
        group = node.group
        assert group is not None
        members = group.node.roster.members
        voters = () if members is None else members.voter_names
        there = [name for name in voters if self._is_there(node, name)]
        return (
            2 * len(there) > len(voters)
            and _has_a_good_disk(node)
            and not len(group.store.log.damaged)
            and not group.node.state.has_hole
        )

    def _is_there(self, node: BrokerNode, name: str) -> bool:
        other = self._world.brokers.get(name)
        return other is node or (
            other is not None
            and other.is_up
            and _has_a_good_disk(other)
            and self.is_linked(node, other)
        )

    def is_linked(self, one: Node, other: Node) -> bool:
        """Whether frames pass both ways between two nodes as if nothing were wrong."""
        links = self._world.network.links
        return links[one.name, other.name].is_healthy and links[other.name, one.name].is_healthy

    def linked_s(self, one: Node, other: Node, what: object = None) -> float:
        """Return for how long two nodes have run and been linked, and *what* was the same.

        It counts from the first call on, and is to be called at each look.
        """
        key, now_s = (one.name, other.name), self._world.elapsed_s
        if not (one.is_up and other.is_up and self.is_linked(one, other)):
            self._pairs.pop(key, None)
            return 0.0
        now = (one.incarnation, other.incarnation, what)
        then = self._pairs.get(key)
        if then is None or then[0] != now:
            then = self._pairs[key] = (now, now_s)
        return now_s - then[1]


def _has_a_good_disk(node: Node) -> bool:
    disk = node.disk
    harmed = disk.delay_s or disk.late_s or disk.flush_failures
    return not harmed and disk.capacity_bytes is None


DUE_WITHIN_S: Final = 20.0
"""Longer than a delivery that is tried again after a refusal, several times over."""

SOONER_MS: Final = 500
"""Of a pause between two questions: what a record waits to be stored differs."""

DATE_NOTICED_S: Final = 80.0
"""A service reads the date again after 60 s: a date that was moved is not noticed before."""


class DueHeads:
    """What waits in one broker group.

    *check_after_ms*: how long an open half message waits for its decision and between two
    questions; None: nothing is demanded.
    """

    def __init__(
        self, world: CheckedWorld, reference: ReferenceReplica, steadiness: Steadiness
    ) -> None:
        self._world = world
        self._reference = reference
        self._steadiness = steadiness
        self.check_after_ms: tuple[int, int] | None = None
        self._due_since_s: dict[tuple[Any, ...], float] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._open: dict[int, OpenHalf] = {}
        self._are_dates_right = True

    def look(self, node: BrokerNode | None) -> None:
        """Look at what waits at a leader that serves steadily; None: there is none."""
        world = self._world
        brokers = world.brokers.values()
        if any(each.clock_offset_ms or each.clock_drift_ppm for each in brokers):
            self._are_dates_right = False
        if node is None or node.group is None or node.process is None:
            self._due_since_s.clear()
            self._open = {}
            return
        self._check_questions(node.group.state)
        self._check_given_up(node.group.state, node.group.dates.wall_ms())
        now_s, steady = world.elapsed_s, self._steadiness
        due = self._due_at(node, node.group.state)
        before, self._due_since_s = self._due_since_s, {}
        for key, within_s in due:
            since_s = self._due_since_s[key] = before.get(key, now_s)
            since_s = max(since_s, steady.date_since_s + DATE_NOTICED_S - within_s)
            if now_s - since_s > within_s:
                what = " ".join(map(str, key))
                world.violate(
                    "overdue", f"{node.name} serves, and for {now_s - since_s:.0f} s waits {what}"
                )
                return

    def _check_questions(self, state: StateTables) -> None:
        """Compare the times of questions; once a date was wrong the log's time is not even."""
        if self.check_after_ms is None or not self._are_dates_right:
            return
        again_ms, asked = self.check_after_ms[1], self._asked
        self._asked = {}
        for half_offset, half in state.transactions.open.items():
            if not half.checks:
                continue
            self._asked[half_offset] = half.checks, half.checked_ms
            checks, before_ms = asked.get(half_offset, (half.checks, half.checked_ms))
            pauses_ms = again_ms * (half.checks - checks)
            if half.checked_ms - before_ms < pauses_ms - SOONER_MS:
                self._world.violate(
                    "asked early",
                    f"half message {half_offset} was asked about {half.checks - checks} times "
                    f"within {half.checked_ms - before_ms} ms, {again_ms} ms are between two",
                )
                return

    def _check_given_up(self, state: StateTables, date_ms: int) -> None:
        """Look at what became of half messages that were open a second ago."""
        if self.check_after_ms is None or not self._are_dates_right:
            return
        first_ms, again_ms = self.check_after_ms
        before, self._open = self._open, dict(state.transactions.open)
        for half_offset, half in before.items():
            decision = state.transactions.decided.get(half_offset)
            if decision is not TransactionDecision.GIVEN_UP or half.checks >= CHECKS_MAX:
                continue
            age_ms = date_ms - half.store_time_ms
            if age_ms < first_ms + CHECKS_MAX * again_ms:
                self._world.violate(
                    "given up early",
                    f"half message {half_offset} is given up after {age_ms} ms and {half.checks} "
                    f"questions of {CHECKS_MAX}",
                )
                return

    def _due_at(self, node: BrokerNode, state: StateTables) -> Iterator[tuple[Any, float]]:
        assert node.group is not None
        date_ms, units = node.group.dates.wall_ms(), self._reference.units
        for topic, queue_id in state.queues:
            if topic == SCHEDULE_TOPIC:
                offset = state.delay_progress.get(queue_id + 1, 0)
                waiting = units(topic, queue_id)[offset:]
                if len(waiting) and int(waiting[0]["tags_code"]) <= date_ms:
                    yield ("delay level", queue_id + 1, offset), DUE_WITHIN_S
        lowest = state.timers.lowest
        if lowest is not None:
            waiting = units(TIMER_TOPIC, 0)[lowest:]
            mask = state.timers.mask(lowest, len(waiting)) & (waiting["tags_code"] <= date_ms)
            for place in mask.nonzero()[0].tolist():
                yield ("timer", lowest + place), DUE_WITHIN_S
        if self.check_after_ms is None:
            return
        first_ms, again_ms = self.check_after_ms
        for half_offset, half in state.transactions.open.items():
            due_ms = half.checked_ms + again_ms if half.checks else half.store_time_ms + first_ms
            if due_ms <= date_ms:
                # A leader that has just begun, or knows no producer yet, asks a whole pause later.
                within_s = DUE_WITHIN_S + 2 * again_ms / 1000
                yield ("half message", half_offset, half.checks), within_s


SPARE_S: Final = 15.0
"""Beside the pause between two registrations: one that fails is repeated after 3 s, and an attempt
to connect takes some."""

LEADER_KNOWN_S: Final = 15.0
"""A change of role is sent at once, and confirmed after an attempt that fails."""

TOPICS_KNOWN_S: Final = 10.0
"""A change of topics is sent at once, and again 3 s after an attempt that fails."""

GONE_S: Final = 2.0
"""Beside the time that the end of a connection takes: a NameServer waits for nothing else."""

ANSWERS_EVERY: Final = 5
"""Of five checks one compares answers: an old one stays old until the next change."""

MASTER_ID: Final = 0

GROUP: Final = "sim"
"""The broker name of the one group."""


class RouteWatch:
    """The routes of one broker group at all NameServers.

    *has_strangers*: a process that is no member registers under the name of the group: then the
    leader may be kept out for a while.
    """

    def __init__(self, world: CheckedWorld, steadiness: Steadiness) -> None:
        self._world = world
        self._steadiness = steadiness
        self.has_strangers = False
        self._looks = 0
        self._changes = 0
        self._were_linked: set[tuple[str, str]] = set()
        self._gone: dict[tuple[str, str], tuple[int, float]] = {}
        self._topics: tuple[Any, ...] = ()
        self._topics_since_s = 0.0

    def look(self, leader: BrokerNode | None) -> None:
        """Look at every NameServer's route; *leader*: one that serves steadily."""
        world, now_s = self._world, self._world.elapsed_s
        for broker in world.brokers.values():
            if broker.leads:
                broker.led_s = now_s
        self._looks += 1
        for server in world.name_servers.values():
            if not (server.is_up and server.host.gate.is_open):
                self._gone = {
                    key: gone for key, gone in self._gone.items() if key[0] != server.name
                }
            if server.is_up and not self._looks % ANSWERS_EVERY:
                self._check_answers(server)
            if server.is_up and not self.has_strangers:
                self._check_old_leader(server)
                self._check_gone(server)
                if leader is not None:
                    self._check_members(server, leader)
                    self._check_topics(server, leader)
        self._were_linked = {
            (server.name, broker.name)
            for server in world.name_servers.values()
            for broker in world.brokers.values()
            if server.is_up
            and server.host.gate.is_open
            and broker.is_up
            and self._steadiness.is_linked(server, broker)
        }
        self._changes = world.network.changes

    def _check_answers(self, server: NameServerNode) -> None:
        routes, answers = server.routes, server.answers
        if routes is None or answers is None:
            return
        for topic in list(routes.topic_queue_table)[:1]:
            route, answer = routes.route(topic), answers.body(topic, Dialect.STANDARD)
            if route is not None and answer != route.encode(Dialect.STANDARD):
                self._world.violate("route", f"{server.name} answers {answer!r}, and has {route}")

    def _check_old_leader(self, server: NameServerNode) -> None:
        world, routes = self._world, server.routes
        broker = None if routes is None else routes.broker_addr_table.get(GROUP)
        address = None if broker is None else broker.broker_addrs.get(MASTER_ID)
        if address is None or routes is None:
            return
        led_s = [node.led_s for node in world.brokers.values() if node.endpoint == address]
        ago_s = world.elapsed_s - max(led_s, default=0.0)
        known = [live for key, live in routes.broker_live_table.items() if key[1] == address]
        kept_ms = max((live.heartbeat_timeout_ms for live in known), default=0)
        if ago_s > (kept_ms + routes.settings.scan_interval_ms) / 1000 + SPARE_S:
            world.violate(
                "route", f"{server.name} names {address} as leader, which led {ago_s:.0f} s ago"
            )

    def _check_gone(self, server: NameServerNode) -> None:
        """Look for members that were killed while nothing was wrong on the way to a NameServer."""
        world, routes = self._world, server.routes
        broker = None if routes is None else routes.broker_addr_table.get(GROUP)
        named = set() if broker is None else set(broker.broker_addrs.values())
        for node in world.brokers.values():
            key = server.name, node.name
            if node.process is not None or not node.host.is_up:
                self._gone.pop(key, None)
                continue
            if key in self._were_linked and self._changes == world.network.changes:
                self._gone.setdefault(key, (server.incarnation, world.elapsed_s))
            incarnation, since_s = self._gone.get(key, (0, world.elapsed_s))
            gone_s = world.elapsed_s - since_s
            if incarnation == server.incarnation and gone_s > GONE_S and node.endpoint in named:
                world.violate(
                    "route", f"{server.name} names {node.name}, which ended {gone_s:.0f} s ago"
                )

    def _check_topics(self, server: NameServerNode, leader: BrokerNode) -> None:
        """Compare how new the topics of the leader are with what a NameServer has of them."""
        world, routes, group = self._world, server.routes, leader.group
        if routes is None or group is None:
            return
        counter = group.state.topics_counter
        topics = (leader.name, leader.incarnation, group.term, counter)
        if topics != self._topics:
            self._topics, self._topics_since_s = topics, world.elapsed_s
        heard_s = self._steadiness.linked_s(leader, server, (True, group.term))
        known_s = min(heard_s, world.elapsed_s - self._topics_since_s)
        live = [live for key, live in routes.broker_live_table.items() if key[1] == leader.endpoint]
        if known_s > TOPICS_KNOWN_S and live and live[0].data_version.counter < counter:
            world.violate(
                "route",
                f"{server.name} is connected with the leader {leader.name} for {heard_s:.0f} s and "
                f"has topics older than {known_s:.0f} s",
            )

    def _check_members(self, server: NameServerNode, leader: BrokerNode) -> None:
        world, routes, group = self._world, server.routes, leader.group
        if routes is None or group is None:
            return
        members = group.node.roster.members
        names = () if members is None else members.names
        broker = routes.broker_addr_table.get(GROUP)
        addresses = {} if broker is None else broker.broker_addrs
        for name in names:
            node = world.brokers.get(name)
            if node is None:
                continue
            leads = node is leader
            heard_s = self._steadiness.linked_s(node, server, (leads, group.term))
            led_s = heard_s if leads else self._steadiness.linked_s(node, leader, group.term)
            settings = node.config.client
            within_s = (settings.register_interval_ms + settings.register_timeout_ms) / 1000
            if min(heard_s, led_s) > within_s + SPARE_S and node.endpoint not in addresses.values():
                world.violate(
                    "route",
                    f"{server.name} is connected with {name} for {heard_s:.0f} s: {addresses}",
                )
            served_s = world.elapsed_s - (self._steadiness.served_since_s or world.elapsed_s)
            known_s = min(heard_s, served_s)
            if leads and known_s > LEADER_KNOWN_S and addresses.get(MASTER_ID) != node.endpoint:
                world.violate(
                    "route",
                    f"{server.name} is connected with the leader {name} for {known_s:.0f} s and "
                    f"has {addresses}",
                )


KNOWN_S: Final = 3.0
"""A member that is linked with a leader knows of it: ten heartbeats and more."""


class RedirectWatch:
    """What the clients of one world learn of refusals.

    *routes*: it knows whether a process that is no member answers under the name of the group.
    """

    def __init__(self, world: CheckedWorld, steadiness: Steadiness, routes: RouteWatch) -> None:
        self._world = world
        self._steadiness = steadiness
        self._routes = routes
        self._leader: BrokerNode | None = None
        self._term = 0

    def look(self, leader: BrokerNode | None) -> None:
        """Note which leader serves steadily; None: none does."""
        group = None if leader is None else leader.group
        self._leader = None if group is None else leader
        if leader is None or group is None:
            return
        self._term = group.term
        for node in self._world.brokers.values():
            if node is not leader:
                self._steadiness.linked_s(node, leader, group.term)

    def watch(self, name: str, instance: ClientInstance) -> None:
        """Look at all refusals that a client is given."""
        search, leaders = instance.leader_search, instance.leaders
        note_refusal = search.note_refusal

        def note_and_look(broker_name: str, address: str, answer: RemotingCommand) -> FailureKind:
            kind = note_refusal(broker_name, address, answer)
            is_of_leader = kind in (FailureKind.REDIRECTED, FailureKind.NOT_LEADER)
            if is_of_leader and broker_name == GROUP and self._is_known_at(address):
                assert self._leader is not None
                self._world.sometimes["redirected"] += 1
                known = leaders.address(broker_name)
                if known != self._leader.endpoint:
                    self._world.violate(
                        "redirected",
                        f"{name} was refused by {address} and takes {known} for the leader, not "
                        f"{self._leader.endpoint}",
                    )
            return kind

        search.note_refusal = note_and_look  # type: ignore[method-assign]

    def _is_known_at(self, address: str) -> bool:
        """Whether a member knows for long enough which leader serves."""
        leader, now_s = self._leader, self._world.elapsed_s
        served_s = now_s - (self._steadiness.served_since_s or now_s)
        if leader is None or self._routes.has_strangers or served_s < KNOWN_S:
            return False
        if leader.group is None or not leader.is_up or leader.group.term != self._term:
            return False
        for node in self._world.brokers.values():
            if node.endpoint == address and node is not leader:
                return self._steadiness.linked_s(node, leader, self._term) > KNOWN_S
        return False
