"""What a nemesis needs of the cluster it works on: a simulated world, or real processes.

Acts that take time in the real world are coroutines. One that cannot be done here raises
`CannotBeDone` with the reason; the step is skipped then, and the reason stands in the history.

What a link does to what it carries (`LinkFault`) is the same for simulated links and the proxy; the
proxy refuses what harms frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, Protocol

from typing_extensions import Buffer

from dledger.commitlog.errors import MQError
from dledger.commitlog.mark import SLOT_STRIDE_BYTES, Mark, decode_slot
from dledger.jepsen_like.plans.budget import LogEnd, Soundness
from dledger.jepsen_like.plans.plan import Kind


@dataclass(slots=True)
class LinkFault:
    """What a link does to what it carries, one way.

    Attributes:
        delay_s, jitter_s: On top of what a healthy link takes.
        bytes_per_s: 0 means no limit.
        loss: Chance of a frame to be lost. That breaks the connection, unless *silent*.
        silent: A lost frame of members is simply missing.
        duplicate: Chance of a member's frame to arrive a second time, later.
        reorder: Chance of a member's frame to arrive behind later ones.
        hold: Chance of a member's frame to be kept for a later connection.
        corrupt: Chance of a member's frame to arrive with a bit flipped.
        spread_s: How much later doubled, held and overtaken frames may come.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    silent: bool = False
    duplicate: float = 0.0
    reorder: float = 0.0
    hold: float = 0.0
    corrupt: float = 0.0
    spread_s: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether frames need not be looked at."""
        return not (self.loss or self.duplicate or self.reorder or self.hold or self.corrupt)


HEALTHY: Final = LinkFault()


class CannotBeDone(Exception):  # noqa: N818  # no error: this machine has not what it takes
    """A fault that cannot be injected here; the text names what is missing."""


@unique
class Moment(Enum):
    """A place in what a client does, at which a fault means most."""

    SENDING = "sending"
    """A send is on its way."""
    HALF_A_BATCH = "half_a_batch"
    """A consumer has taken half of what it pulled, and committed none of it."""


class Machine(Protocol):
    """One machine with a process of the cluster, or of its clients, on it."""

    @property
    def name(self) -> str:
        """Its name in plans and histories."""

    @property
    def is_up(self) -> bool:
        """Whether its process serves and is not paused."""

    @property
    def is_down(self) -> bool:
        """Whether it has no process."""

    async def start(self) -> bool:
        """Start the process; tell whether it runs."""

    async def kill(self) -> None:
        """End the process at once; what it wrote stays in the page cache. Idempotent."""

    async def stop(self) -> bool:
        """Ask the process to end cleanly; tell whether it did."""

    def pause(self) -> None:
        """Stop the process where it is."""

    def resume(self) -> None:
        """Let it go on."""


class Member(Machine, Protocol):
    """A machine with a broker on it."""

    @property
    def seen_commit(self) -> int:
        """Newest commit index it has shown."""

    async def restart_newer(self) -> None:
        """Stop it and start it as a broker of a later release; `start` ends that."""

    async def power_cut(self) -> None:
        """End process and machine at once; what was not flushed is lost."""

    async def kill_at_point(self, skip: int, *, power: bool) -> str:
        """End the process inside one of the next acts of its disk, after *skip*; return where.

        With *power* what was not flushed is lost, too. Empty: the disk did too little for that.
        """

    async def wipe(self) -> None:
        """Lose the disk; the process is killed before."""

    async def rot(self, bits: int) -> str:
        """Flip bits of what is on the disk of a machine that is down; tell where."""

    async def spoil_sectors(self, sectors: int) -> str:
        """Let reads of *sectors* sectors of its files fail until they are written; return where.

        Raises CannotBeDone: its disk is a real one.
        """

    async def rot_file(self, arg: int) -> str:
        """Let a file that is not a segment go bad, on a machine that is down; return where.

        Raises CannotBeDone: its disk is a real one.
        """

    async def tear_tail(self, size_bytes: int) -> str:
        """Write over the newest bytes of the log of a machine that is down; tell where.

        What the commit mark covers stays. Empty when there is nothing else.
        """

    async def lie_about_flushes(self, *, lies: bool) -> None:
        """Let flushes of the log return and make nothing durable; false ends that.

        Raises CannotBeDone: its disk is a real one.
        """

    async def undo_lied_flushes(self) -> str:
        """Let a machine that is down lose, by chance, what these flushes wrote; return how much.

        Raises CannotBeDone: its disk is a real one.
        """

    async def begin_work_late(self, by_s: float) -> None:
        """Let blocking work begin up to *by_s* late; 0 heals.

        Raises CannotBeDone: it is a real process.
        """

    async def limit_files(self, spare: int | None) -> str:
        """Let the process open *spare* more files and connections; None heals.

        Returns:
            What the limit was, and what it did to the process; empty when there is nothing to say.
        """

    async def flood(self, connections: int) -> str:
        """Open idle connections; 0 closes them. Return what became of them."""

    async def fill_disk(self, left_bytes: int | None) -> None:
        """Let the disk have only *left_bytes* more; None heals."""

    async def slow_disk(self, delay_s: float) -> None:
        """Let every flush take *delay_s* longer; 0 heals."""

    async def fail_flushes(self, number: int) -> None:
        """Let the next flushes fail; 0 heals."""

    def jump_clock(self, by_ms: int) -> None:
        """Move the machine's date."""

    def drift_clock(self, ppm: float) -> None:
        """Let the machine's clocks run faster or slower."""


class Workload(Protocol):
    """What runs on the machines of clients, as far as faults steer it."""

    async def reach(self, moment: Moment) -> None:
        """Wait until some client is at *moment*."""

    def begin_where_committed(self) -> None:
        """Consumers that start from now on ask the broker where to begin."""

    def hold_consumers(self) -> None:
        """Let consumers stand still before their next step, with what they have in hand."""

    def release_consumers(self) -> int:
        """Let them commit what they had in hand and go on; tell how many offsets that is.

        Idempotent.
        """


class Links(Protocol):
    """The network between machines, by name and one way each."""

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from *source* to *target*."""

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again; connections with bytes waiting may be reset."""

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Damage what passes."""

    def reset_between(self, one: str, other: str) -> object:
        """Reset all connections between the two."""


class Ground(Protocol):
    """A cluster that faults may be done to."""

    @property
    def elapsed_s(self) -> float:
        """Time of the run; the history's clock."""

    @property
    def brokers(self) -> Mapping[str, Member]:
        """By name, in a fixed order."""

    @property
    def name_servers(self) -> Mapping[str, Machine]:
        """By name."""

    @property
    def proxies(self) -> Mapping[str, Machine]:
        """Proxies of the gRPC protocol by name; empty where clients use the SDK."""

    @property
    def clients(self) -> Mapping[str, Machine]:
        """By name."""

    @property
    def workload(self) -> Workload:
        """What the clients do."""

    async def start_doubles(self) -> None:
        """Start, on another machine, consumers under the names of those there are."""

    async def steal_name(self, for_s: float, identity: str) -> str:
        """Let a process that is no member be after the group's broker name, at every NameServer.

        It names the group *identity*; empty: none. Returns what became of it.
        """

    async def attack_peers(self, for_s: float) -> str:
        """Let a process that is no member talk to the peer ports; return what became of it."""

    async def end_doubles(self) -> None:
        """End them, as a kill does. Idempotent."""

    @property
    def network(self) -> Links:
        """The links between them."""

    @property
    def sometimes(self) -> Counter[str]:
        """Where a nemesis counts what really happened."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""

    async def sleep_until(self, elapsed_s: float) -> None:
        """Let time pass up to *elapsed_s* after the begin."""

    def leading(self) -> str | None:
        """Name of the member that leads and serves now, else led last; None when none ever led."""

    def leads_now(self) -> bool:
        """Whether a member leads and serves now."""

    async def role_change(self) -> str:
        """Wait for the next change of role; return the name of the member that has begun to lead.

        Raises CannotBeDone: roles are not seen the moment they change.
        """

    async def read_at(self, name: str, reads: int) -> None:
        """Let a client that takes *name* for the leader read *reads* times at one moment.

        Raises CannotBeDone: there is no machine for it.
        """

    def tell_leader(self, name: str) -> None:
        """Let running clients know that *name* leads, as its registration does.

        Raises CannotBeDone: clients find it by themselves.
        """

    def voters(self) -> Sequence[tuple[str, ...]]:
        """The lists of voters that members follow, or followed when they ended."""

    def soundness(self, name: str) -> Soundness:
        """What is known of a broker."""

    async def look(self) -> None:
        """Ask every broker for its status; the answers below are not older than this call."""

    def log_end(self, name: str) -> LogEnd | None:
        """How far a broker's log reaches; None when it does not answer."""

    async def order(self, kind: Kind, name: str, *, asked: str = "") -> None:
        """Give the leader an order about the member *name*.

        Args:
            asked: The member that gets the order; empty: the leader.
        Raises:
            MQError: It was refused, or its end is unknown.
            CannotBeDone: No member leads.
        """

    def missing_members(self) -> Sequence[str] | None:
        """Brokers that are no members, as the leader sees it; None when none leads."""


class FaultError(MQError):
    """A fault could not be injected or healed; the message names what is left as it was."""


def marked_end(mark_file: Buffer) -> int:
    """Return the byte position up to which the log is at rest, from the file of its commit mark.

    For faults that damage what was written long ago: bad bytes in the newest entries are the same
    as a write that a crash has torn, and a start that finds them takes them for that
    (docs/operate/operations.md). What the commit mark covers cannot be mistaken.
    """
    view = memoryview(mark_file)
    slots = [decode_slot(bytes(view[at : at + 512])) for at in (0, SLOT_STRIDE_BYTES)]
    whole = [slot for slot in slots if slot is not None]
    return Mark.decode(max(whole)[1]).end_position if whole else 0
