"""From what each round measured to the medians, the ratios and the targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One load in one round.

    Attributes:
        error: Why there are no figures; empty: there are. With `gaps_ms`: what ended the kills.
        broker_cpu_s: Processor seconds of the three brokers per million messages.
        client_cpu_s: The same of the client.
        rss_mib: Of the three brokers together, pages of mapped files included.
        gaps_ms: Of kills: from SIGKILL to the next acknowledgement.
    """

    contender: str
    case: str
    round: int
    error: str = ""
    rate: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    messages: int = 0
    failed: int = 0
    broker_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    rss_mib: float = 0.0
    gaps_ms: tuple[float, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table: medians over the rounds; of kills, the ranks of all gaps together.

    Attributes:
        rounds: How many rounds have figures.
        lowest: Lowest rate of a round; `highest` the highest.
        kills: How many gaps there are.
        errors: What went wrong, of each round where something did.
    """

    contender: str
    case: str
    rounds: int
    errors: tuple[str, ...] = ()
    rate: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    failed: int = 0
    broker_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    rss_mib: float = 0.0
    kills: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One aim.

    Attributes:
        measured: None: a row it needs is missing.
        met: None as well then.
    """

    what: str
    aim: str
    measured: float | None
    unit: str
    met: bool | None


def rank(values: Sequence[float], part: float) -> float:
    """Return the value below which *part* of all lie: the nearest rank, as the loads do it."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


def rows_of(measured: Sequence[Measured]) -> list[Row]:
    """Return one row for each contender and load, in the order of their first round."""
    pairs = dict.fromkeys((one.contender, one.case) for one in measured)
    return [_row([one for one in measured if (one.contender, one.case) == pair]) for pair in pairs]


def _row(rounds: list[Measured]) -> Row:
    good = [one for one in rounds if not one.error or one.gaps_ms]
    errors = tuple(one.error for one in rounds if one.error)
    contender, case = rounds[0].contender, rounds[0].case
    if not good:
        return Row(contender=contender, case=case, rounds=0, errors=errors)

    def middle(value: Callable[[Measured], float]) -> float:
        return median(map(value, good))

    gaps = [gap for one in good for gap in one.gaps_ms]
    rates = [one.rate for one in good]
    return Row(
        contender=contender,
        case=case,
        rounds=len(good),
        errors=errors,
        rate=median(rates),
        lowest=min(rates),
        highest=max(rates),
        p50_ms=rank(gaps, 0.5) if gaps else middle(lambda one: one.p50_ms),
        p99_ms=rank(gaps, 0.99) if gaps else middle(lambda one: one.p99_ms),
        p999_ms=rank(gaps, 0.999) if gaps else middle(lambda one: one.p999_ms),
        failed=sum(one.failed for one in good),
        broker_cpu_s=middle(lambda one: one.broker_cpu_s),
        client_cpu_s=middle(lambda one: one.client_cpu_s),
        rss_mib=middle(lambda one: one.rss_mib),
        kills=len(gaps),
    )


Value = Callable[[Measured], float]


def ratio(
    measured: Sequence[Measured], over: tuple[str, str], under: tuple[str, str], value: Value
) -> float | None:
    """Return the median of the rounds' ratios of two rows; None when no round has both.

    Round by round, as the two were measured one after the other: what slows the machine for a while
    slows both.

    Args:
        over: Contender and load; `under` the one it is divided by.
    """
    by_round = [
        {
            one.round: value(one)
            for one in measured
            if (one.contender, one.case) == pair and not one.error
        }
        for pair in (over, under)
    ]
    ratios = [
        by_round[0][number] / by_round[1][number]
        for number in by_round[0]
        if by_round[1].get(number)
    ]
    return median(ratios) if ratios else None


def _rate(one: Measured) -> float:
    return one.rate


def _p50(one: Measured) -> float:
    return one.p50_ms


def _broker_cpu(one: Measured) -> float:
    return one.broker_cpu_s


_RATIOS: Final[tuple[tuple[str, str, str, str, Value, str, float], ...]] = (
    ("1 outstanding: p50 against NATS, synced", "1", "ours", "nats-synced", _p50, "≤", 1.0),
    ("64 outstanding: rate against NATS", "64", "ours", "nats", _rate, "≥", 1.0),
    ("64 outstanding: rate against NATS, synced", "64", "ours", "nats-synced", _rate, "≥", 2.5),
    ("512 outstanding: rate against NATS", "512", "ours", "nats", _rate, "≥", 1.5),
    ("batches: rate against RocketMQ", "batches", "ours", "rocketmq", _rate, "≥", 10.0),
    (
        "batches: rate against RocketMQ, `enableBatchPush`",
        *("batches", "ours", "rocketmq-batch-push", _rate, "≥", 5.0),
    ),
    (
        "same Java client, 64 outstanding: rate against RocketMQ",
        *("64", "ours-java", "rocketmq", _rate, "≥", 4.0),
    ),
    (
        "same Java client, 1 outstanding: p50 of RocketMQ against ours",
        *("1", "rocketmq", "ours-java", _p50, "≥", 1.3),
    ),
    (
        "512 outstanding: brokers' CPU per message against NATS",
        *("512", "ours", "nats", _broker_cpu, "≤", 0.7),
    ),
    ("drain: rate against NATS", "drain", "ours", "nats", _rate, "≥", 2.0),
)
"""What, load, over, under, value, comparison, limit."""


def targets(measured: Sequence[Measured]) -> list[Target]:
    """Return every target with what was measured; ours are flushed on a majority."""
    found = [
        _target(what, ratio(measured, (over, case), (under, case), value), "times", sign, limit)
        for what, case, over, under, value, sign, limit in _RATIOS
    ]
    own = [
        one.p99_ms / one.p50_ms
        for one in measured
        if (one.contender, one.case) == ("ours", "64") and not one.error and one.p50_ms
    ]
    spread = median(own) if own else None
    found.insert(-1, _target("64 outstanding: p99 / p50", spread, "times", "≤", 3.0))
    gaps = [
        gap / 1000
        for one in measured
        if (one.contender, one.case) == ("ours", "kill")
        for gap in one.gaps_ms
    ]
    for part, limit in ((0.5, 0.2), (0.99, 0.5)):
        what = f"kill of the leader → next ack, p{100 * part:g} of {len(gaps)} kills"
        found.append(_target(what, rank(gaps, part) if gaps else None, "s", "≤", limit))
    return found


def _target(what: str, measured: float | None, unit: str, sign: str, limit: float) -> Target:
    met = None
    if measured is not None:
        met = measured >= limit if sign == "≥" else measured <= limit
    return Target(what=what, aim=f"{sign} {limit:g} {unit}", measured=measured, unit=unit, met=met)
