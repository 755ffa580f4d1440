"""A plan: everything that will be done to a cluster, as data, and the seed of all chance.

A step heals itself after `for_ms`, so dropping one never leaves another without its end, and a
target is a role or a number taken modulo what there is, so no step becomes meaningless when others
are dropped. At the end everything is healed, whatever the steps say.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Any, Final

import msgspec

from dledger.commitlog.errors import ConfigError

PLAN_VERSION: Final = 1


@unique
class Kind(StrEnum):
    """What a step does; what `arg` means stands with it."""

    # Nodes. The node comes back after `for_ms`.
    KILL = "kill"
    """SIGKILL: memory is lost, the page cache stays."""
    CLEAN_RESTART = "clean_restart"
    """SIGTERM, wait for the end, start again after `for_ms`."""
    ROLLING_RESTART = "rolling_restart"
    """Every node in turn, each when the one before has caught up."""
    PAUSE = "pause"
    """SIGSTOP for `for_ms`."""
    POWER_CUT = "power_cut"
    """What was not flushed is lost, sector by sector, by chance."""
    POWER_CUT_ALL = "power_cut_all"
    """All brokers at one instant."""
    WIPE = "wipe"
    """The disk is replaced by an empty one."""
    BUGGIFY_KILL = "buggify_kill"
    """Kill at the next occurrence of a named point of the disk; `arg` chooses which."""
    VERSION_SKEW = "version_skew"
    """It is stopped and runs as a broker of a later release for `for_ms`, then as itself again:
    its peers refuse what it speaks meanwhile."""
    FD_LIMIT = "fd_limit"
    """It may open `arg` more files and connections; real processes only."""
    CONNECTIONS = "connections"
    """`arg` connections that say nothing, 0: 10,000; real processes only."""
    # Links.
    ISOLATE = "isolate"
    """The target and all other brokers do not hear each other; clients hear both.
    An odd `arg` resets their connections first, where that can be done, so that the others
    notice at once."""
    SPLIT = "split"
    """Brokers, NameServers and clients fall into two parts; `arg` is the bit mask of one."""
    MUTE = "mute"
    """Nothing from the target arrives; it receives from all."""
    DEAF = "deaf"
    """Nothing arrives at the target; all receive from it."""
    PARTIAL = "partial"
    """The target and the broker `arg` behind it do not hear each other; others hear both."""
    RING = "ring"
    """Every broker receives from its two neighbours only."""
    BRIDGE = "bridge"
    """Two halves that only the target connects."""
    SWIZZLE = "swizzle"
    """Links are cut one by one and mended one by one in another order."""
    CLIENT_CUT = "client_cut"
    """Clients and NameServers, and the target, do not hear each other."""
    RESET = "reset"
    """Every connection of the target is reset."""
    # What links do; `arg` per mille of frames unless something else is written. Frames alone are
    # harmed in the simulator only: a connection of TCP is whole or breaks.
    LOSS = "loss"
    DELAY = "delay"
    """`arg` ms more, one way, with as much jitter."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    HOLD = "hold"
    """Frames of members arrive on a later connection."""
    CORRUPT = "corrupt"
    SLOW_LINK = "slow_link"
    """`arg` bytes per second."""
    # Disks.
    DISK_FULL = "disk_full"
    DISK_SLOW = "disk_slow"
    """Flushes take `arg` ms."""
    FSYNC_ERROR = "fsync_error"
    """The next flush fails and loses its pages; the node must stop, and starts after `for_ms`."""
    BIT_ROT = "bit_rot"
    """`arg` bits of flushed log bytes flip; the node is killed and restarted after `for_ms`."""
    TORN_TAIL = "torn_tail"
    """Killed, and up to `arg` of its newest log bytes, none below the commit mark, are no entries
    any more; it starts again after `for_ms`."""
    BAD_SECTOR = "bad_sector"
    """`arg` / 2 sectors of the log, the entry index or the key index, and one more, cannot be read
    until they are written; with an odd `arg` the node is killed first and starts again after
    `for_ms`, so that it meets them at its start. The simulator only."""
    FILE_ROT = "file_rot"
    """Killed, and a file that is not a segment goes bad: consume queue, shared units, key index,
    snapshot, identity or entry index, by `arg` % 6. With `arg` // 6 % 2 a sector of it cannot be
    read, else `arg` // 12, and one more, of its bits flip. It starts again after `for_ms`; one
    that refuses to, for its identity, has its disk replaced by an empty one. The simulator only."""
    LYING_FLUSH = "lying_flush"
    """Flushes of the log return for `for_ms` and make nothing durable; then power fails, once the
    other voters hold all that the log may have acknowledged. The simulator only."""
    STALL = "stall"
    """For `for_ms` the process stands still again and again, for up to `arg` ms; with an odd `arg`
    its blocking work begins up to `arg` ms late instead. The simulator only."""
    # Clocks.
    CLOCK_JUMP = "clock_jump"
    """The date moves by `arg` ms, for good; durations do not."""
    CLOCK_DRIFT = "clock_drift"
    """Both clocks run `arg` millionths faster."""
    CLOCK_YEARS = "clock_years"
    """The date is `arg` years off, 0: two, for `for_ms` and then right again; of one broker at a
    time, so that most voters agree on the date."""
    # Orders to the group.
    TRANSFER = "transfer"
    """Leadership moves to the target."""
    MEMBER_ADD = "member_add"
    MEMBER_REMOVE = "member_remove"
    MEMBER_REPLACE = "member_replace"
    CHANGE_WITHOUT_MINORITY = "change_without_minority"
    """The members are changed while a minority of them is away for `for_ms`: killed, with an odd
    `arg` cut off. `arg` // 2 % 4 is the change, see `jepsen_like.nemesis.members`. Those away
    when the plan ends stay away until the others have elected and changed the members again."""
    # NameServers and clients.
    NAMESRV_KILL = "namesrv_kill"
    """Target is a number, or ``all``."""
    NAMESRV_LOSS = "namesrv_loss"
    """Frames between the NameServers and all others are lost, `arg` per mille of them."""
    CLIENT_KILL = "client_kill"
    """All producers and consumers, or all readers, in the middle of what they do."""
    MID_SEND_KILL = "mid_send_kill"
    """All producers and consumers, at a moment at which a send is on its way."""
    MID_BATCH_KILL = "mid_batch_kill"
    """All producers and consumers, when a consumer is half through what it pulled; consumers begin
    again where they committed."""
    ZOMBIE_CLIENT = "zombie_client"
    """Consumers stand still with offsets in hand while others under their names go on; after half
    of `for_ms` they wake, commit what they had, and both go on."""
    ROLE_ORDER = "role_order"
    """The next member that begins to lead, within `for_ms`, is asked to change the members, by
    `arg` // 4 up to 50 ms later and mostly within a few; `arg` % 4 is the change, see
    `dledger.jepsen_like.nemesis.nemesis`. The simulator only."""
    READ_BURST = "read_burst"
    """A leader is cut off from the other brokers for up to `for_ms`, with an odd `arg` it stands
    still as well; with every second even one it has handed over its leadership and does not hear
    the others. Once another one has led for a while, a client with the old route asks the old one
    `arg` times at one moment. The simulator only."""
    # Proxies of the gRPC protocol.
    PROXY_KILL = "proxy_kill"
    """SIGKILL of a proxy; it starts again on its address after `for_ms`. Target is a number, or
    ``all``; real processes only."""
    PROXY_PAUSE = "proxy_pause"
    """SIGSTOP of a proxy for `for_ms`; likewise."""
    # Strangers.
    NAME_THIEF = "name_thief"
    """A process that is no member registers as the leader at every NameServer, takes the members
    out and answers sends as if it stored them; with an odd `arg` as a second group with an
    identity of its own; the simulator only."""
    PEER_STRANGER = "peer_stranger"
    """A process that is no member talks to the peer ports of the group: hellos, terms, votes and
    entries that it made up; the simulator only."""


FRAME_KINDS: Final = frozenset({Kind.LOSS, Kind.DUPLICATE, Kind.REORDER, Kind.HOLD, Kind.CORRUPT})
"""Kinds that harm single frames."""

LINK_QUALITIES: Final = FRAME_KINDS | {Kind.DELAY, Kind.SLOW_LINK}
"""Kinds that let links carry worse; they may lie on all links at once."""

CUTS: Final = frozenset(
    {
        *(Kind.ISOLATE, Kind.SPLIT, Kind.MUTE, Kind.DEAF, Kind.PARTIAL, Kind.RING, Kind.BRIDGE),
        Kind.CLIENT_CUT,
    }
)
"""Kinds that let links carry nothing, all at one instant."""

PROXY_KINDS: Final = frozenset({Kind.PROXY_KILL, Kind.PROXY_PAUSE})
"""Kinds that hit proxies, for plans whose clients go through some."""

REAL_ONLY: Final = frozenset({Kind.VERSION_SKEW, Kind.FD_LIMIT, Kind.CONNECTIONS}) | PROXY_KINDS
"""Kinds the simulator cannot do, and so draws no steps of: all its brokers are one program, and it
has no proxy."""

ASKED_FOR: Final = PROXY_KINDS | frozenset(
    {
        Kind.NAME_THIEF,
        Kind.PEER_STRANGER,
        Kind.CLOCK_YEARS,
        Kind.CHANGE_WITHOUT_MINORITY,
        Kind.BAD_SECTOR,
        Kind.FILE_ROT,
        Kind.LYING_FLUSH,
        Kind.STALL,
        Kind.NAMESRV_LOSS,
        Kind.ROLE_ORDER,
        Kind.READ_BURST,
    }
)
"""Kinds that are drawn only where they are asked for by name: the plans of seeds stay as they
were when a kind is added."""

ROLES: Final = ("leader", "follower", "most_behind", "most_ahead", "all")
"""Targets that are resolved when the step happens; a number means that broker, modulo."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One thing done.

    Attributes:
        at_ms: When, counted from the end of set-up.
        target: A role of `ROLES`, or a number as text.
        for_ms: How long; healed then.
    """

    at_ms: int
    kind: Kind
    target: str = "leader"
    for_ms: int = 0
    arg: int = 0

    @property
    def end_ms(self) -> int:
        """When it is healed."""
        return self.at_ms + self.for_ms


class Workload(msgspec.Struct, frozen=True):
    """What clients do meanwhile.

    Attributes:
        lockers: Logical clients that lock queues and commit offsets under their locks.
        producers: Logical clients that send, each one message at a time.
        consumers: Logical clients that pull, and commit their offsets.
        readers: Logical clients that ask for max offsets and pull at random places.
        interval_ms: Mean pause between two operations of one client.
        body_bytes: Largest body; sizes are drawn, with the borders preferred.
        delayed_per_mille: Sends that carry a delay level.
        timer_per_mille: Sends that carry a time of their own.
        recall_per_mille: Steps of producers that take one of these back.
        send_back_per_mille: Pulls of consumers after which they send a message back.
        producer_life_s: A producer process is replaced by a new one about so often; 0: never.
        rest_per_mille: Pauses of readers that are `REST_FACTOR` times as long: what they know of
            the cluster is old then.
        idempotent: Producers are idempotent and repeat what got no answer. Off, each row is one
            attempt.
        filterers: Logical clients that pull with an expression; messages carry tags and properties
            then.
        push_members: Machines of a push group whose members come and go; 0: there is none.
        push_change_s: Mean pause between two of them; 0: they stay.
        push_polled: Its members poll (`LitePullConsumer`) and have no listeners.
        hostile_per_mille: Messages with properties that try the broker's services.
        timer_roll_s: Messages with a time of their own are stored again after this many seconds,
            and wait for up to `ROLLS_MAX` times as long; 0: the window of two days, which no plan
            reaches.
        receivers: Logical clients that receive messages one by one (POP).
        shared_receivers: Those of one group on one machine share a consumer, and so its requests.
        steppers: Logical clients that read, send and commit in exactly-once steps.
        proxies: Proxies of the gRPC protocol that producers and receivers go through; 0: they use
            the SDK. Real processes only.
        expirers: Logical clients that send messages with a time to live, and read them.
    """

    producers: int = 2
    consumers: int = 1
    readers: int = 1
    interval_ms: int = 2000
    queues: int = 2
    body_bytes: int = 2048
    delayed_per_mille: int = 100
    batch_per_mille: int = 50
    producer_life_s: int = 0
    rest_per_mille: int = 0
    lockers: int = 0
    idempotent: bool = False
    push_members: int = 0
    push_change_s: int = 20
    push_orderly: bool = False
    push_polled: bool = False
    transactions_per_mille: int = 0
    timer_per_mille: int = 0
    recall_per_mille: int = 0
    send_back_per_mille: int = 0
    filterers: int = 0
    hostile_per_mille: int = 0
    timer_roll_s: int = 0
    receivers: int = 0
    steppers: int = 0
    shared_receivers: bool = False
    proxies: int = 0
    expirers: int = 0

    @property
    def clients(self) -> int:
        """How many act by the interval: all but members of push groups."""
        return sum(getattr(self, name) for name in CLIENTS)

    @property
    def fits_proxies(self) -> bool:
        """Whether all that producers send can go through a proxy: plain messages and batches."""
        return not (
            self.delayed_per_mille
            or self.timer_per_mille
            or self.transactions_per_mille
            or self.hostile_per_mille
            or self.idempotent
        )


CLIENTS: Final = (
    *("producers", "consumers", "readers", "lockers", "filterers"),
    *("receivers", "steppers", "expirers"),
)
"""Fields of a workload that say how many clients of a kind act by the interval."""

LATER_FIELDS: Final = (
    ("workload", "timer_roll_s"),
    ("workload", "receivers"),
    ("workload", "steppers"),
    ("workload", "shared_receivers"),
    ("workload", "proxies"),
    ("workload", "expirers"),
    ("workload", "push_polled"),
    ("settings", "async_master"),
    ("settings", "sessions_max"),
    ("settings", "timer_load_units"),
    ("settings", "pull_messages"),
)
"""Fields of a workload and of settings that texts of plans leave out where they say nothing: the
texts of plans stay as they were when one is added."""

PROXIES_MAX: Final = 5

ROLLS_MAX: Final = 3
"""A message with a time of its own is stored again this often, where that is asked for."""

REST_FACTOR: Final = 5
"""How much longer a rest is than a pause."""


class Settings(msgspec.Struct, frozen=True):
    """How the cluster is configured; slow timers make long runs cheap.

    Attributes:
        election_ms: Election timeout; a new one is drawn between it and twice it.
        segment_bytes: Small, so that the log rolls.
        queue_units: Units per consume queue file; small, so that queues roll.
        checkpoint_ms: Between local snapshots.
        register_ms: Between registrations with NameServers.
        delay_levels: As ``messageDelayLevel``.
        sync_flush: Flush before an acknowledgement; the guarantee that is checked depends on it.
        keep_segments: Older ones go, once a checkpoint covers them; 0: all are kept.
        append_bytes: Of one append to a follower; small, so that catching up takes several.
        async_master: A leader acknowledges what it alone has flushed; the law is weaker then, see
            `dledger.jepsen_like.checkers.fault_record`.
        lock_lease_ms: How long a queue stays locked for a client that does not renew it.
        sessions_max: Sessions of idempotent producers that are kept; 0: as many as brokers keep.
        timer_load_units: Units of the timer queue that are read in one go; 0: as brokers do.
        pull_messages: Messages of one pull; 0: as brokers do.
    """

    heartbeat_ms: int = 1000
    election_ms: int = 3000
    segment_bytes: int = 131_072
    queue_units: int = 64
    checkpoint_ms: int = 3000
    register_ms: int = 30_000
    delay_levels: str = "1s 5s 10s 30s"
    sync_flush: bool = True
    keep_segments: int = 0
    append_bytes: int = 1 << 20
    lock_lease_ms: int = 60_000
    async_master: bool = False
    sessions_max: int = 0
    timer_load_units: int = 0
    pull_messages: int = 0

    @property
    def lock_lease_ns(self) -> int:
        """The same, as checkers take it."""
        return self.lock_lease_ms * 1_000_000


class Plan(msgspec.Struct, frozen=True):
    """A whole run before it happens.

    Attributes:
        duration_ms: When the faults end; healing, catching up and reading come after.
        steps: In order of `at_ms`.
        note: For people: what it once showed.
    """

    seed: int
    duration_ms: int
    steps: tuple[Step, ...] = ()
    members: int = 3
    name_servers: int = 1
    workload: Workload = Workload()
    settings: Settings = Settings()
    note: str = ""
    version: int = PLAN_VERSION
    modes: tuple[str, ...] = ()

    def with_steps(self, steps: tuple[Step, ...]) -> Plan:
        """Return the plan with other steps."""
        return msgspec.structs.replace(self, steps=steps)

    def faster(self, factor: float) -> Plan:
        """Return the plan with everything *factor* times as soon; timers stay as they are."""
        return msgspec.structs.replace(
            self,
            duration_ms=round(self.duration_ms / factor),
            steps=tuple(
                msgspec.structs.replace(
                    step, at_ms=round(step.at_ms / factor), for_ms=round(step.for_ms / factor)
                )
                for step in self.steps
            ),
        )


def encode_plan(plan: Plan) -> str:
    """Return *plan* as JSON, one step a line."""
    steps = ",\n    ".join(msgspec.json.encode(step).decode() for step in plan.steps)
    rest: dict[str, Any] = msgspec.to_builtins(plan)
    del rest["steps"]
    if not plan.modes:
        del rest["modes"]
    for part, name in LATER_FIELDS:
        if not rest[part][name]:
            del rest[part][name]
    lines = [f'  "{key}": {msgspec.json.encode(value).decode()}' for key, value in rest.items()]
    lines.append('  "steps": [' + (f"\n    {steps}\n  ]" if steps else "]"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def decode_plan(text: str | bytes) -> Plan:
    """Return the plan in *text*. Raises ConfigError: it is no plan, or one of a newer format."""
    try:
        plan = msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
        raise ConfigError(f"no plan: {error}") from None
    if plan.version > PLAN_VERSION:
        raise ConfigError(
            f"a plan of format {plan.version}; the newest known here is {PLAN_VERSION}"
        )
    if not (1 <= plan.members <= 7 and 1 <= plan.name_servers <= 5 and plan.duration_ms > 0):
        raise ConfigError("a plan has 1 to 7 members, 1 to 5 name servers and some duration")
    if not 0 <= plan.workload.proxies <= PROXIES_MAX:
        raise ConfigError(f"a plan has up to {PROXIES_MAX} proxies")
    if plan.workload.proxies and not plan.workload.fits_proxies:
        raise ConfigError("through proxies, producers send plain messages and batches only")
    for step in plan.steps:
        if step.target not in ROLES and not step.target.isdecimal():
            raise ConfigError(f"step target {step.target!r} is neither a role nor a number")
        if step.at_ms < 0 or step.for_ms < 0:
            raise ConfigError(f"step {step} lies before the beginning")
    return plan.with_steps(tuple(sorted(plan.steps, key=lambda step: step.at_ms)))
