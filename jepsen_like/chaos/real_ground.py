"""The ground of a run with real processes: machines, links, roles, and orders to the group.

Over a link that the kernel cuts, packets vanish and a connection stays as it is on both sides: it
is sent again ever more rarely, and programs find out by their own time limits alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import trio

from dledger.cli.commands import open_client
from dledger.client.core.errors import ClientError
from dledger.jepsen_like.chaos.cluster import ChaosCluster
from dledger.jepsen_like.chaos.machines import RealMachine, RealMember
from dledger.jepsen_like.chaos.namespaces import RunNetwork, rule_lines
from dledger.jepsen_like.chaos.proxy import LinkProxy
from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import (
    HEALTHY,
    CannotBeDone,
    FaultError,
    LinkFault,
    Machine,
    Workload,
)
from dledger.jepsen_like.plans.budget import LogEnd, Soundness
from dledger.jepsen_like.plans.plan import Kind
from dledger.remoting.protocol.codes import RequestCode, ResponseCode

# ---------------------------------------------------------------------------------- links


class KernelLinks:
    """The links between the hosts of a network; see `dledger.jepsen_like.nemesis.ground.Links`.

    What is asked for happens some milliseconds later, in `serve`. Hosts that the network has not
    are left alone.
    """

    def __init__(self, network: RunNetwork) -> None:
        self.sometimes: Counter[str] = Counter()
        self._network = network
        self._wanted: set[tuple[str, str]] = set()
        self._there: frozenset[tuple[str, str]] = frozenset()
        self._changed = trio.Event()

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from *source* to *target*."""
        pair = self._addresses(source, target)
        if pair is not None and pair not in self._wanted:
            self._wanted.add(pair)
            self.sometimes["link_cut"] += 1
            self._changed.set()

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again; connections go on when their senders try again.

        *reset*: not heeded: the kernel resets no connection of others.
        """
        pair = self._addresses(source, target)
        if pair is not None:
            self._wanted.discard(pair)
            self._changed.set()

    def mend_all(self) -> None:
        """Heal every cut."""
        self._wanted.clear()
        self._changed.set()

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Only whole links and cut ones can be had here.

        Raises CannotBeDone: *fault* is another one.
        """
        if fault != HEALTHY:
            raise CannotBeDone("links of the kernel can be cut only; the proxy does more to them")

    def reset_between(self, one: str, other: str) -> object:
        """Connections are left half open here, never reset. Raises CannotBeDone: always."""
        raise CannotBeDone("only the proxy resets connections")

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out what is asked for, until cancelled; started at once.

        Raises FaultError: the kernel refused; which links are cut is not known.
        """
        task_status.started()
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            wanted = frozenset(self._wanted)
            lines = rule_lines(self._there, wanted)
            await trio.to_thread.run_sync(partial(self._network.route, lines))
            self._there = wanted

    def _addresses(self, source: str, target: str) -> tuple[str, str] | None:
        hosts = self._network.hosts
        if source not in hosts or target not in hosts:
            return None
        return hosts[source].address, hosts[target].address


# ---------------------------------------------------------------------------------- the ground


LOOK_S: Final = 0.2
"""How often every broker is asked how it is."""

ORDER_TIMEOUT_S: Final = 20.0


class RealGround:
    """A `dledger.jepsen_like.nemesis.ground.Ground` over processes, and the watcher of their roles.

    Args:
        begin_ns: `time.monotonic_ns` at the begin of the run: the zero of its clock.
        on_sample: Called with each broker's answer, as a map, a few times a second.

    Attributes:
        brokers, name_servers, proxies, clients: By name; the proxies are of the gRPC protocol, the
            clients the runner's own.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        members: Mapping[str, RealMember],
        links: LinkProxy | KernelLinks,
        clients: Mapping[str, Any],
        *,
        begin_ns: int,
        on_event: Callable[[Event], None],
        on_sample: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._cluster = cluster
        self.brokers = dict(members)
        self.clients = dict(clients)
        self._workload: Workload | None = None
        self._doubles: Machine | None = None
        self.name_servers = {
            name: RealMachine(cluster, node) for name, node in cluster.name_servers.items()
        }
        self.proxies = {name: RealMachine(cluster, node) for name, node in cluster.proxies.items()}
        self._begin_ns = begin_ns
        self._on_event = on_event
        self._on_sample = on_sample
        self._leading: str | None = None
        self._roles: dict[str, tuple[str, int]] = {}
        self.network = links
        self.sometimes = links.sometimes

    @property
    def elapsed_s(self) -> float:
        """Time of the run."""
        return (time.monotonic_ns() - self._begin_ns) / 1e9

    @property
    def now_ns(self) -> int:
        """Time of the run, as rows have it."""
        return time.monotonic_ns() - self._begin_ns

    def set_clients(self, clients: Mapping[str, Any], workload: Workload, doubles: Machine) -> None:
        """Make the runner's clients known, when they have begun."""
        self.clients = dict(clients)
        self._workload, self._doubles = workload, doubles

    @property
    def workload(self) -> Workload:
        """What the clients do; they must have begun."""
        assert self._workload is not None
        return self._workload

    async def start_doubles(self) -> None:
        """Start consumers under the names of those there are."""
        if self._doubles is not None:
            await self._doubles.start()

    async def _no_stranger(self, *_: object) -> NoReturn:
        """State why not."""
        raise CannotBeDone("no machine of this run is a stranger's")

    steal_name = attack_peers = _no_stranger

    async def end_doubles(self) -> None:
        """End them."""
        if self._doubles is not None:
            await self._doubles.kill()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await trio.sleep(seconds)

    async def sleep_until(self, elapsed_s: float) -> None:
        """Let time pass up to a moment of the run."""
        await trio.sleep(max(0.0, elapsed_s - self.elapsed_s))

    # -- watching --------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask every broker how it is, again and again, until cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask every broker once."""

        async def ask_one(member: RealMember) -> None:
            await member.look()
            self._note_role(member)

        async with trio.open_nursery() as nursery:
            for member in self.brokers.values():
                nursery.start_soon(ask_one, member)

    def _note_role(self, member: RealMember) -> None:
        status, now_ns = member.status, self.now_ns
        role = (str(status.get("role", "")), int(status.get("term", 0)))
        if role != self._roles.get(member.name):
            self._roles[member.name] = role
            detail = f"{role[0]} term {role[1]}" if status else "silent"
            self._on_event(Event(now_ns, now_ns, "role", node=member.name, detail=detail))
        self._on_sample(
            {
                "at_ns": now_ns,
                "node": member.name,
                "role": role[0],
                "term": role[1],
                "commit_index": int(status.get("commit_index", 0)),
                "last_index": int(status.get("last_index", 0)),
                "is_up": bool(status),
            }
        )

    def _leader(self) -> RealMember | None:
        leading = [
            (int(member.status["term"]), member.name)
            for member in self.brokers.values()
            if member.status.get("serving") and member.is_up
        ]
        if not leading:
            return None
        self._leading = max(leading)[1]
        return self.brokers[self._leading]

    def leading(self) -> str | None:
        """Name of the member that leads now, or led last."""
        self._leader()
        return self._leading

    def leads_now(self) -> bool:
        """Whether a member leads."""
        return self._leader() is not None

    def voters(self) -> Sequence[tuple[str, ...]]:
        """The lists that members follow, or followed when they were asked last."""
        return sorted({member.seen_voters for member in self.brokers.values()} - {()})

    def soundness(self, name: str) -> Soundness:
        """The condition a broker reports; damage that is not found yet is the scrub's to find."""
        member, leader = self.brokers[name], self._leader()
        status = member.status
        if not member.is_up or not status:
            return Soundness(False, keeps_promises=False, is_caught_up=False, is_intact=False)
        firm = (
            not (status["doubtful"] or status["damaged"])
            and not status["scrub"]["damaged_entries"]
            and name in member.seen_voters
        )
        if leader is None:
            return Soundness(True, firm, is_caught_up=False, is_intact=False)
        caught_up = firm and status["commit_index"] >= leader.status["commit_index"]
        intact = caught_up and status["scrub"]["passes"] > 0
        return Soundness(True, firm, caught_up, intact)

    def log_end(self, name: str) -> LogEnd | None:
        """How far a broker's log reaches, by its last answer; None while it is silent."""
        member = self.brokers[name]
        status = member.status
        if not member.is_up or not status:
            return None
        held = min(int(status["commit_index"]), int(status["stable_index"]))
        return LogEnd(int(status["last_index"]), held)

    # -- orders ----------------------------------------------------------------------------

    async def _unseen(self, *_: object) -> NoReturn:
        """State why not."""
        raise CannotBeDone("a role is known here by the next answer only")

    role_change = read_at = _unseen

    def tell_leader(self, name: str) -> None:
        """State why not."""
        raise CannotBeDone("clients here find the leader by themselves")

    async def order(self, kind: Kind, name: str, *, asked: str = "") -> None:
        """Send the leader the order that ``dledger raft`` would."""
        leader = self._leader()
        if leader is None:
            raise CannotBeDone("no member leads")
        op = {
            Kind.TRANSFER: "transfer",
            Kind.MEMBER_REMOVE: "remove",
            Kind.MEMBER_REPLACE: "replace",
        }.get(kind, "add")
        address = self._cluster.ports[name].peer_address
        ext = {"op": op, "name": name, "address": address if op in ("add", "replace") else ""}
        try:
            async with open_client([leader.address]) as client:
                answer = await client.ask(
                    leader.address, RequestCode.RAFT_CHANGE, ext, timeout_s=ORDER_TIMEOUT_S
                )
        except ClientError as error:
            raise FaultError(str(error)) from None
        if answer.code != ResponseCode.SUCCESS:
            raise FaultError(f"code {answer.code}: {answer.remark}")

    def missing_members(self) -> Sequence[str] | None:
        """Brokers that the leader's list lacks."""
        leader = self._leader()
        if leader is None:
            return None
        there = {member["name"] for member in leader.status.get("members", ())}
        return [name for name in self.brokers if name not in there]
