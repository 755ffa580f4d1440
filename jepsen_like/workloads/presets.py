"""The workloads that have a name on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from dledger.jepsen_like.plans.plan import Kind, Workload

BODY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload by name.

    Attributes:
        workload: How many of each client there are for a rate of 1,000 operations a second.
        members: Brokers that the simulator draws from; empty: as for any other plan.
        times: How many times the few clients of a simulated cluster it has, each slower.
        modes: What the simulator's plans have beside it; see `dledger.jepsen_like.plans.modes`.
    """

    about: str
    workload: Workload
    kinds: frozenset[Kind] = frozenset()
    members: tuple[int, ...] = ()
    times: int = 1
    modes: tuple[str, ...] = ()


def _workload(**shape: int | bool) -> Workload:
    base = Workload(
        interval_ms=40,
        queues=4,
        body_bytes=BODY_BYTES,
        delayed_per_mille=0,
        batch_per_mille=0,
        producers=24,
        consumers=8,
        readers=8,
    )
    return msgspec.structs.replace(base, **shape)


PRESETS: Final[dict[str, Preset]] = {
    "queue-log": Preset(
        "send, pull and max-offset on many queues; every queue is one list in real time",
        _workload(queues=8, consumers=0, readers=16),
    ),
    "offsets": Preset(
        "consumers that commit and go on where they committed; each offset is a register",
        _workload(producers=12, consumers=24, readers=12),
    ),
    "push": Preset(
        "a push group whose members join, leave and are killed: all consumed, every queue owned",
        _workload(producers=24, consumers=0, readers=0, push_members=4, push_change_s=8),
    ),
    "push-in-order": Preset(
        "a push group that consumes each queue in its order, while members join, leave and are"
        " killed: none before those in front of it",
        _workload(
            producers=24, consumers=0, readers=0, push_members=4, push_change_s=8, push_orderly=True
        ),
    ),
    "polls": Preset(
        "a group whose members poll, give polls up, seek back, pause and commit, while they join,"
        " leave and are killed: nothing is passed over, every queue owned",
        _workload(
            producers=24, consumers=0, readers=0, push_members=4, push_change_s=8, push_polled=True
        ),
    ),
    "transactions": Preset(
        "transactional messages, ends sent twice, late, both ways or never: each decided once",
        _workload(transactions_per_mille=800, producers=32, consumers=4, readers=4),
    ),
    "delayed": Preset(
        "messages with a delay: never early, exactly once, none lost",
        _workload(delayed_per_mille=500, producers=28, consumers=8, readers=4),
    ),
    "timers": Preset(
        "messages with a time of their own, some of them recalled: never early, exactly once, none"
        " lost, none that was recalled",
        _workload(timer_per_mille=600, recall_per_mille=150, producers=28, consumers=8, readers=4),
    ),
    "retries": Preset(
        "consumers that send messages back: each comes again, counted, or goes to the dead letters",
        _workload(send_back_per_mille=400, producers=16, consumers=24, readers=4),
    ),
    "drain": Preset(
        "send as much as goes, read everything at the end: nothing lost, nothing doubled",
        _workload(producers=40, consumers=0, readers=0, batch_per_mille=200),
    ),
    "idempotent": Preset(
        "idempotent producers repeat what got no answer: nothing doubled, order kept",
        _workload(
            producers=32, readers=4, batch_per_mille=200, delayed_per_mille=50, idempotent=True
        ),
    ),
    "locks": Preset(
        "clients that lock queues, renew, stand still and commit under old locks: one holder at a"
        " time, and old tokens fenced off",
        _workload(producers=8, consumers=0, readers=4, lockers=28),
    ),
    "pop": Preset(
        "consumers that receive messages one by one, acknowledge, forget, ask for more time and"
        " use old receipts: one consumer at a time, never again once acknowledged, none lost",
        _workload(producers=16, consumers=0, readers=4, receivers=24, shared_receivers=True),
    ),
    "grpc": Preset(
        "producers, and consumers by POP, that go through two proxies of the gRPC protocol, and"
        " through the other one when a call breaks: stored once, none lost, received as by pop",
        _workload(
            producers=16, consumers=0, readers=4, receivers=24, batch_per_mille=100, proxies=2
        ),
    ),
    "steps": Preset(
        "consumers that read, send on and commit in one step, often several from one offset: each"
        " message is worked off exactly once",
        _workload(producers=16, consumers=0, readers=4, steppers=24),
    ),
    "time-to-live": Preset(
        "messages that expire, and others beside them: none is delivered after its time, none"
        " within it is passed over",
        _workload(producers=12, consumers=0, readers=4, expirers=28),
    ),
    "filters": Preset(
        "consumers that ask for tags or with SQL92: all that matches is seen, nothing else",
        _workload(
            producers=16,
            consumers=0,
            readers=4,
            filterers=24,
            batch_per_mille=100,
            delayed_per_mille=50,
            transactions_per_mille=50,
        ),
    ),
    "demo": Preset(
        "send and read back while others read: what `dledger demo` plays",
        _workload(producers=32, consumers=0, readers=8, body_bytes=256),
    ),
    "mixed": Preset(
        "plain, delayed and batched sends, pulls, offsets",
        _workload(delayed_per_mille=50, batch_per_mille=200),
    ),
    "hostile": Preset(
        "properties that are the broker's own, odd or as long as can be, through every service: no"
        " node ends, nothing is lost or doubled",
        _workload(
            producers=32,
            readers=4,
            hostile_per_mille=600,
            batch_per_mille=50,
            delayed_per_mille=250,
            timer_per_mille=250,
            recall_per_mille=50,
            transactions_per_mille=200,
            send_back_per_mille=200,
        ),
    ),
    "years": Preset(
        "messages with delays and times, transactions and idempotent producers, while the date of"
        " one broker is two years off: none early, none lost, store time stays right",
        _workload(
            producers=32,
            idempotent=True,
            delayed_per_mille=250,
            timer_per_mille=250,
            recall_per_mille=50,
            transactions_per_mille=200,
        ),
        frozenset({Kind.CLOCK_YEARS}),
    ),
    "minority": Preset(
        "members added and removed while a minority is away: the others elect and change on",
        _workload(producers=24, delayed_per_mille=50, batch_per_mille=100),
        frozenset({Kind.CHANGE_WITHOUT_MINORITY}),
        members=(3, 4, 5, 5),
    ),
    "crowd": Preset(
        "many clients of five members, of which processes lead twice, while disks stand still, and"
        " administrative acts that meet each other",
        _workload(producers=30, consumers=20, readers=10, lockers=10, idempotent=True),
        members=(5,),
        times=10,
        modes=("leads_again", "unknown_outcomes", "topic_deletion"),
    ),
    "rolls": Preset(
        "messages with times further away than the roll window, of any properties: rolled in"
        " time, delivered once",
        _workload(
            producers=32,
            hostile_per_mille=600,
            timer_per_mille=500,
            recall_per_mille=50,
            timer_roll_s=60,
        ),
    ),
    "everything": Preset(
        "every service at once, on one topic",
        _workload(
            producers=48,
            consumers=8,
            readers=4,
            lockers=5,
            filterers=5,
            push_members=3,
            push_change_s=15,
            idempotent=True,
            batch_per_mille=90,
            delayed_per_mille=270,
            timer_per_mille=240,
            recall_per_mille=70,
            transactions_per_mille=100,
            send_back_per_mille=120,
        ),
    ),
}


SIMULATED_CLIENTS: Final = {
    "producers": 3,
    "consumers": 2,
    "readers": 1,
    "lockers": 4,
    "push_members": 2,
    "filterers": 7,
    "receivers": 4,
    "steppers": 4,
    "expirers": 6,
}
"""The most of each in a simulated cluster; all but members of push groups act by the interval."""
SIMULATED_INTERVAL_MS: Final = 1500
SIMULATED_PUSH_INTERVAL_MS: Final = 500
"""Members of a push group are to have something in hand when one of them ends."""


def simulated_workload(name: str) -> Workload:
    """Return the workload *name* with the few clients that a simulated cluster needs.

    Where there are no proxies clients use the SDK.

    Raises KeyError: there is none of that name.
    """
    workload, times = PRESETS[name].workload, PRESETS[name].times
    if workload.push_members and not workload.lockers:
        return msgspec.structs.replace(
            workload, producers=2, push_members=3, queues=4, interval_ms=SIMULATED_PUSH_INTERVAL_MS
        )
    few = {
        name: min(most * times, getattr(workload, name)) for name, most in SIMULATED_CLIENTS.items()
    }
    interval_ms = SIMULATED_INTERVAL_MS * (3 if times > 1 else 1)
    return msgspec.structs.replace(workload, **few, proxies=0, queues=2, interval_ms=interval_ms)


def workload_for(name: str, rate: float) -> Workload:
    """Return the workload *name* at about *rate* operations a second, every client in turn.

    Raises KeyError: there is none of that name.
    """
    workload = PRESETS[name].workload
    clients = workload.clients + (workload.consumers if workload.send_back_per_mille else 0)
    return msgspec.structs.replace(
        workload, interval_ms=max(1, round(1000 * clients / max(rate, 1.0)))
    )
