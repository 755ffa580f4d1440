"""A network of nodes: byte streams that arrive late, not at all, twice, or on a later connection.

Every node has one host with an address of its own, and between any two hosts stand two links, one
each way. A link without faults hands what is sent to the other end after its delay, whole. Faults
act on whole frames: both protocols begin every frame with its length as a big-endian u32.

What TCP can do is done to every connection: delay, holding back, cutting, resetting. What it
cannot do is done to the members' links alone, whose frames are numbered for it: frames lost in
silence, twice, out of order, and frames of an old connection that arrive on a new one.

========================  ================================================================
cut                       nothing arrives; what is sent waits for the link to heal
host down (power cut)     nothing arrives, without a sign of it; after its return: resets
process killed            the ends it had open show it to the other side, if the link lets them
process paused            connections stay and are accepted; bytes wait to be read
========================  ================================================================
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.simulation.event_trace import Event, Trace
from dledger.jepsen_like.simulation.sim_stream import (
    JITTER_S,
    LATENCY_S,
    Host,
    Link,
    SimListener,
    SimStream,
)
from dledger.jepsen_like.simulation.virtual_time import Gate, VirtualTime
from dledger.remoting.addresses import join_address
from dledger.remoting.seams import ServerTls

PEER_PORT: Final = 40911
"""Connections to this port carry the members' frames."""

SYN_AGAIN_S: Final = 0.5
"""How often an attempt to connect over a cut link is repeated within its timeout."""


@dataclass(slots=True)
class SimNetwork:
    """All hosts and links of a world.

    *on_members_send*: called with source, target and bytes of everything members send each other.
    """

    time: VirtualTime
    rng: SimRng
    trace: Trace
    hosts: dict[str, Host] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    by_address: dict[str, Host] = field(default_factory=dict)
    random: Callable[[], float] = field(init=False)
    connections: int = 0
    changes: int = 0
    on_members_send: Callable[[str, str, bytes], None] = lambda _source, _target, _data: None

    def __post_init__(self) -> None:
        self.random = self.rng.random

    def add_host(self, name: str, number: int, address: str) -> Host:
        """Put a machine on the network, linked with all others."""
        host = Host(name, number, address)
        for other in self.hosts.values():
            self.links[name, other.name] = Link(host, other)
            self.links[other.name, name] = Link(other, host)
        self.hosts[name] = self.by_address[address] = host
        self.links[name, name] = Link(host, host)
        return host

    def view(self, host: Host) -> NodeNetwork:
        """Return the Network of the process that starts on *host*."""
        return NodeNetwork(self, host)

    # -- faults ----------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from *source* to *target*; what is sent waits."""
        self.links[source, target].is_cut = True
        self.changes += 1
        self._note(Event.LINK_FAULT, source, target, 1)

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again.

        *reset*: chance of each connection with bytes waiting to be broken instead.
        """
        link = self.links[source, target]
        link.is_cut = False
        self.changes += 1
        self._note(Event.LINK_FAULT, source, target, 2)
        self._release(
            (s for s in link.source.streams.values() if s.link is link and s.queued), reset
        )
        if link.source.is_up:
            self._answer(link.source)

    def cut_between(self, left: Iterable[str], right: Iterable[str]) -> None:
        """Cut both ways between two sides."""
        ours, theirs = list(left), list(right)
        for one in ours:
            for other in theirs:
                if one != other:
                    self.cut(one, other)
                    self.cut(other, one)

    def mend_all(self, *, reset: float = 0.0) -> None:
        """Heal every cut and every link."""
        for (source, target), link in self.links.items():
            if link.fault is not HEALTHY:
                link.set(HEALTHY)
                self.changes += 1
                self._hurry(link)
            if link.is_cut:
                self.mend(source, target, reset=reset)

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Let a link behave like *fault*."""
        link = self.links[source, target]
        link.set(fault)
        self.changes += 1
        if not fault.bytes_per_s:
            self._hurry(link)
        self._note(Event.LINK_FAULT, source, target, 3)

    def reset_between(self, one: str, other: str) -> int:
        """Break every connection between two hosts, both ends at once; return how many."""
        found = [s for s in self.hosts[one].streams.values() if s.link.target.name == other]
        for stream in found:
            stream.was_reset()
            stream.peer.was_reset()
        return len(found)

    def kill(self, host: Host, *, silent: bool) -> None:
        """End the process on *host*: its ends close, or vanish when *silent*."""
        streams, host.streams = host.streams, {}
        host.listeners = {}
        for stream in streams.values():
            stream.abandon()
            if not silent:
                self._transmit(stream, None)
        host.gate = Gate()

    def power_on(self, host: Host) -> None:
        """Let *host* answer again; what was sent to its ended process meanwhile gets a reset."""
        host.is_up = True
        self._answer(host)

    def _answer(self, host: Host) -> None:
        for stream in [s for s in host.unanswered.values() if not s.link.is_cut]:
            del host.unanswered[stream.number]
            self.send_reset(stream)

    def resume(self, streams: Iterable[SimStream]) -> None:
        """Send what tasks of a paused process wanted to send."""
        self._release((s for s in streams if s.queued), 0.0)

    def _release(self, streams: Iterable[SimStream], reset: float) -> None:
        for stream in list(streams):
            if stream.link.is_cut or not stream.host.gate.is_open:
                continue
            queued, stream.queued = stream.queued, []
            if reset and self.random() < reset:
                self.send_reset(stream)
                stream.was_reset()
                continue
            for data in queued:
                self._transmit(stream, data)

    def _note(self, event: Event, source: str, target: str, what: int) -> None:
        hosts = self.hosts
        self.trace.note(event, hosts[source].number, hosts[target].number, what)

    # -- carrying --------------------------------------------------------------------------

    def send(self, stream: SimStream, data: bytes | None) -> None:
        """Carry bytes, or the end, to the other end of *stream*."""
        link = stream.link
        if stream.of_members and data is not None:
            self.on_members_send(stream.host.name, link.target.name, data)
        if link.is_cut or not stream.host.gate.is_open or stream.queued:
            stream.queued.append(data)
        elif link.is_plain and not stream.has_rest:
            stream.sent_frames += 1
            self._deliver(stream, data)
        else:
            self._send_frames(stream, data)

    def _deliver(self, stream: SimStream, data: bytes | None) -> None:
        """Let *data* arrive in its turn."""
        link, now_s, before_s = stream.link, self.time.now_s, stream.last_at_s
        at_s = stream.arrival_s(now_s, len(data or b""), self.random())
        timer = self.time.call_at(at_s, stream.peer.arrived, data)
        if link.fault.bytes_per_s:
            while link.late and link.late[0][0].call is None:
                link.late.popleft()
            link.late.append((timer, stream, data, before_s))

    def _hurry(self, link: Link) -> None:
        """Deliver at full speed what a link took while it was slow."""
        late = [item for item in link.late if item[0].call is not None]
        link.late.clear()
        link.busy_until_s = self.time.now_s
        for timer, stream, _, before_s in reversed(late):
            timer.cancel()
            stream.last_at_s = before_s
        for _, stream, data, _ in late:
            self._deliver(stream, data)

    def _transmit(self, stream: SimStream, data: bytes | None) -> None:
        if stream.link.is_cut:
            stream.queued.append(data)
            # Its process may have ended, but the bytes are the machine's to send again.
            stream.host.streams.setdefault(stream.number, stream)
        elif data is None or (stream.link.is_plain and not stream.has_rest):
            self._deliver(stream, data)
        else:
            self._send_frames(stream, data)

    def send_reset(self, stream: SimStream) -> None:
        """Notify the other end that nothing is read here any more."""
        link = stream.link
        if link.is_cut:
            return
        at_s = self.time.now_s + link.fault.delay_s
        self.time.call_at(at_s, stream.peer.was_reset, None)

    def _send_frames(self, stream: SimStream, data: bytes | None) -> None:
        if data is None:
            self._deliver(stream, None)
            return
        for frame in stream.whole_frames(data):
            if not self._send_frame(stream, frame):
                return

    def _send_frame(self, stream: SimStream, frame: bytes) -> bool:
        link, chance, time = stream.link, self.random, self.time
        fault, peer, members = link.fault, stream.peer, stream.of_members
        stream.sent_frames += 1
        sometimes = self.trace.sometimes
        if fault.loss and chance() < fault.loss:
            self.trace.note(Event.LOST, link.target.number, stream.number, len(frame))
            sometimes["frame_lost"] += 1
            if fault.silent and members:
                stream.on_its_way(-len(frame))
                return True
            self.send_reset(stream)
            stream.was_reset()
            return False
        first = stream.sent_frames == 1  # the hello; without it no connection stands
        if members and not first:
            if fault.hold and chance() < fault.hold:
                link.held.append((stream.number, frame))
                stream.on_its_way(-len(frame))
                sometimes["frame_held"] += 1
                return True
            if fault.corrupt and chance() < fault.corrupt:
                bad = bytearray(frame)
                bad[4 + self.rng.randrange(len(bad) - 4)] ^= 1 << self.rng.randrange(8)
                frame = bytes(bad)
                sometimes["frame_corrupted"] += 1
            if fault.duplicate and chance() < fault.duplicate:
                later_s = time.now_s + fault.delay_s + chance() * fault.spread_s
                time.call_at(later_s, peer.arrived, frame)
                stream.on_its_way(len(frame))
                sometimes["frame_doubled"] += 1
            if fault.reorder and chance() < fault.reorder:
                later_s = time.now_s + fault.delay_s + chance() * fault.spread_s
                time.call_at(later_s, peer.arrived, frame)
                sometimes["frame_overtaken"] += 1
                return True
        self._deliver(stream, frame)
        if members and not first and link.held and chance() < 0.5:
            number, old = link.held.popleft()
            if number != stream.number:
                self._deliver(stream, old)
                stream.on_its_way(len(old))
                sometimes["frame_from_old_connection"] += 1
            elif fault.hold:
                link.held.append((number, old))
            if not link.held:
                link.is_plain = fault.is_plain
        return True

    async def connect(self, source: Host, host: str, port: int, timeout_s: float) -> SimStream:
        """Open a connection; see `NodeNetwork.connect`."""
        time, deadline_s = self.time, self.time.now_s + timeout_s
        where = join_address(host, port)
        target = self.by_address.get(host)
        if target is None:
            await time.sleep(LATENCY_S)
            raise OSError(errno.EHOSTUNREACH, f"no route to {host}")
        there, back = self.links[source.name, target.name], self.links[target.name, source.name]
        gate = source.gate
        while True:
            delay_s = there.fault.delay_s + back.fault.delay_s + self.random() * JITTER_S
            await time.sleep(min(delay_s, timeout_s))
            if target.is_up and not (there.is_cut or back.is_cut) and gate.is_open:
                break
            if time.now_s >= deadline_s:
                raise TimeoutError(f"no connection to {where} within {timeout_s} s")
            await time.sleep(min(SYN_AGAIN_S, max(0.0, deadline_s - time.now_s)))
        listener = target.listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{where} refused")
        self.connections = number = self.connections + 2
        source.next_port = local_port = 50_000 + (source.next_port - 49_999) % 15_000
        here = (source.address, local_port)
        of_members = port == PEER_PORT
        mine = SimStream(self, source, there, number, here, (host, port), of_members=of_members)
        theirs = SimStream(
            self, target, back, number + 1, (host, port), here, of_members=of_members
        )
        mine.peer, theirs.peer = theirs, mine
        self.trace.note(Event.CONNECT, source.number, target.number, number)
        listener.offer(theirs)
        return mine


class NodeNetwork:
    """`dledger.remoting.seams.Network` of one process."""

    __slots__ = ("_host", "_network", "is_gone")

    def __init__(self, network: SimNetwork, host: Host) -> None:
        self._network = network
        self._host = host
        self.is_gone = False

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> SimListener:
        """Bind *port* of this node. Raises OSError: the port is taken."""
        await trio.lowlevel.checkpoint()
        if self.is_gone or port in self._host.listeners:
            raise OSError(errno.EADDRINUSE, f"{join_address(host, port)} is in use")
        listener = SimListener(self._host, (self._host.address, port))
        self._host.listeners[port] = listener
        return listener

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> SimStream:
        """Connect. Raises OSError: refused, unreachable or timed out."""
        if self.is_gone:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.ENETDOWN, "the process has ended")
        return await self._network.connect(self._host, host, port, timeout_s)
