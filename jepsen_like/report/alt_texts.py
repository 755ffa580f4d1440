"""What each picture shows, in a sentence for those who do not see it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jepsen_like.report.faults import Fault
from jepsen_like.report.order import QueueOrder
from jepsen_like.report.roles import Reign
from jepsen_like.report.series import F64, Availability, Latency, Rates, Served
from jepsen_like.report.wording import kind_text, many


def latency_alt(latency: Latency) -> str:
    """Say the usual latency, and when the slowest operation was called."""
    if np.isnan(latency.max_ms).all():
        return "Latency over time: nothing was acknowledged."
    worst = int(np.nanargmax(latency.max_ms))
    return (
        f"Latency over time: usual median {np.nanmedian(latency.p50_ms):,.1f} ms, "
        f"slowest {latency.max_ms[worst]:,.0f} ms at {latency.at_s[worst]:,.0f} s."
    )


def rate_alt(rates: Rates) -> str:
    """Say how much was acknowledged, and how much was not."""
    return (
        f"Operations per second over time: at most {rates.ok.max():,.0f} ok, "
        f"{rates.info.max():,.0f} info and {rates.fail.max():,.0f} fail."
    )


def leader_alt(reigns: Sequence[Reign]) -> str:
    """Say who led when."""
    shown = "; ".join(
        f"{reign.node} term {reign.term} from {reign.begin_s:,.0f} to {reign.end_s:,.0f} s"
        for reign in reigns[:20]
    )
    more = f"; and {len(reigns) - 20} more" if len(reigns) > 20 else ""
    return f"Who led: {shown or 'nobody'}{more}."


def lag_alt(lag: Mapping[str, F64]) -> str:
    """Say how far each follower was behind at its worst."""
    worst = ", ".join(f"{node} {np.nanmax(behind):,.0f}" for node, behind in lag.items())
    return f"Entries behind the leader over time, at worst: {worst}."


def availability_alt(availability: Availability) -> str:
    """Say when no send was acknowledged."""
    gaps = [(begin, end) for kind, begin, end in availability.spells if kind is Served.NO]
    if not gaps:
        return "Every second with sends had an acknowledgement."
    shown = ", ".join(f"{begin:,.0f} to {end:,.0f} s" for begin, end in gaps[:20])
    return f"No send was acknowledged in {many(len(gaps), 'spell')}: {shown}."


def order_alt(order: QueueOrder) -> str:
    """Say what the witnesses say."""
    said = "; ".join(
        f"operation {mark.op.op_id}: {mark.says} {mark.low}"
        + (f" to {mark.high}" if mark.high > mark.low else "")
        for mark in order.marks
        if mark.is_witness
    )
    return f"Offsets over time in {order.queue}. Witnesses: {said}."


def faults_alt(faults: Sequence[Fault]) -> str:
    """Say how often each fault was done; the table below the picture says when."""
    counted = Counter(kind_text(fault.kind) for fault in faults)
    return "Faults over time: " + ", ".join(f"{kind} {n}" for kind, n in counted.items()) + "."
