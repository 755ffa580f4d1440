"""Which broker is measured with what load, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from dledger.output import CliError, ExitCode
from tools.bench.loads import CASE
from tools.bench.tools import NATS_VERSION, ROCKETMQ_VERSION

PAGE_CACHE: Final = "page cache of a majority"
FLUSH: Final = "flush on a majority"

SENDS: Final = ("1", "64", "512")
KILL_S: Final = 6.0
"""A kill, the next acknowledgement, a restart and the settling, about."""

JAVA_KILL_S: Final = 35.0
"""RocketMQ's clients read their routes every 30 s."""

START_S: Final = {"go": 5.0, "java": 20.0, "": 6.0}
CLIENT_S: Final = {"go": 0.5, "java": 2.0, "sdk": 1.0}
FILL_S: Final = 10.0
"""Brokers to start and to stop; a client to start and to end; a backlog to write."""


class Contender(msgspec.Struct, frozen=True):
    """Brokers with a client.

    Attributes:
        waits_for: What an acknowledgement means.
        chains: Tool chains that its brokers and its client need, of ``go`` and ``java``.
        client: ``go``, ``java`` or ``sdk``.
    """

    key: str
    title: str
    waits_for: str
    chains: tuple[str, ...]
    client: str
    cases: tuple[str, ...]


CONTENDERS: Final = (
    Contender(
        *("nats", f"NATS {NATS_VERSION} R3", PAGE_CACHE, ("go",), "go"),
        (*SENDS, "drain", "kill"),
    ),
    Contender(
        *("nats-synced", f"NATS {NATS_VERSION} R3, `sync_interval: always`", FLUSH, ("go",), "go"),
        SENDS,
    ),
    Contender(
        "rocketmq",
        f"RocketMQ {ROCKETMQ_VERSION} DLedger, Java client",
        *(PAGE_CACHE, ("java",), "java", (*SENDS, "batches", "drain", "kill")),
    ),
    Contender(
        "rocketmq-batch-push",
        f"RocketMQ {ROCKETMQ_VERSION} DLedger, `enableBatchPush`, Java client",
        *(PAGE_CACHE, ("java",), "java", ("batches",)),
    ),
    Contender(
        "ours-java",
        "dledger, the same Java client",
        *(FLUSH, ("java",), "java", (*SENDS, "batches", "drain", "kill")),
    ),
    Contender("ours", "dledger, its SDK", FLUSH, (), "sdk", (*SENDS, "batches", "drain", "kill")),
)
CONTENDER: Final = {contender.key: contender for contender in CONTENDERS}


class Step(msgspec.Struct, frozen=True):
    """One start of a contender's brokers and the loads on them, one after the other."""

    round: int
    contender: Contender
    cases: tuple[str, ...]


def plan(rounds: int, only: Sequence[str]) -> list[Step]:
    """Return all steps: each round has every contender once, each time beginning with another.

    Args:
        only: ``CONTENDER``, ``CASE`` or ``CONTENDER/CASE``; none: all.
    Raises:
        CliError: A name that does not exist, or a pair that is not measured; a usage error.
    """
    chosen = [
        (contender, cases)
        for contender in CONTENDERS
        if (cases := tuple(case for case in contender.cases if _wanted(contender.key, case, only)))
    ]
    for name in only:
        if not any(
            _wanted(contender.key, case, (name,)) for contender, cases in chosen for case in cases
        ):
            raise CliError(
                f"--only {name}: nothing is measured under this name",
                next_step=f"take one of {', '.join([*CONTENDER, *CASE])}, or nats/64",
                exit_code=ExitCode.USAGE,
            )
    return [
        Step(number, contender, cases)
        for number in range(rounds)
        for contender, cases in _rotated(chosen, number * len(chosen) // max(rounds, 1))
    ]


def _wanted(contender: str, case: str, only: Sequence[str]) -> bool:
    return not only or any(name in (contender, case, f"{contender}/{case}") for name in only)


def _rotated(
    chosen: list[tuple[Contender, tuple[str, ...]]], by: int
) -> list[tuple[Contender, tuple[str, ...]]]:
    return [*chosen[by:], *chosen[:by]]


def chains_of(steps: Sequence[Step]) -> set[str]:
    """Return the tool chains that the steps need."""
    return {chain for step in steps for chain in step.contender.chains}


def kills_of(contender: Contender, kills: int) -> int:
    """Return how many kills a contender gets in a round: the targets are for our SDK alone."""
    return kills if contender.client == "sdk" else 1


def estimate_s(steps: Sequence[Step], case_s: float, brokers_warm_s: float, kills: int) -> float:
    """Return about how long the steps take.

    Args:
        case_s: Of one load, warming up included; *brokers_warm_s* of the one before the first.
        kills: Of our SDK, each round.
    """
    total = 0.0
    for step in steps:
        java = step.contender.client == "java"
        total += brokers_warm_s + CLIENT_S[step.contender.client]
        total += START_S["" if step.contender.key.startswith("ours") else step.contender.client]
        for case in step.cases:
            if case == "kill":
                total += kills_of(step.contender, kills) * (JAVA_KILL_S if java else KILL_S)
            else:
                total += (
                    case_s + CLIENT_S[step.contender.client] + (FILL_S if case == "drain" else 0.0)
                )
    return total
