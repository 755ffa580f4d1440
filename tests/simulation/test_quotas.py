"""Clients above their quota while leaders change: all acknowledged messages stay, all calls end."""

from __future__ import annotations

from collections import Counter

import pytest

from dledger.client.admin.admin import Admin
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from dledger.services.quota_buckets import Cost, QuotaBuckets, Verdict
from dledger.state.quotas import QuotaConfig

pytestmark = pytest.mark.slow

RATE = 2
PLAN = Plan(
    seed=5,
    duration_ms=60_000,
    steps=(Step(20_000, Kind.KILL, "leader", 5_000), Step(40_000, Kind.ISOLATE, "leader", 6_000)),
    workload=Workload(producers=3, consumers=2, interval_ms=150, batch_per_mille=300),
)


async def slow_clients_down(operator: ClientNode) -> None:
    """Give each client a quota below what it sends and receives."""
    assert operator.instance is not None
    while True:
        try:
            await Admin(operator.instance).set_quota(
                client="", sent_messages_per_s=RATE, received_messages_per_s=4 * RATE
            )
        except MQError:  # there is no leader yet
            await operator.clock.sleep(0.5)
        else:
            return


def test_quotas_lose_nothing_while_leaders_change(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: Counter[str] = Counter()
    send, receive = QuotaBuckets.send, QuotaBuckets.receive

    def noted(what: str, verdict: Verdict) -> Verdict:
        how = "passes" if verdict == Verdict(True) else "waits" if verdict.passes else "refused"
        verdicts[f"{what} {how}"] += 1
        return verdict

    def send_noted(
        self: QuotaBuckets, key: str, quota: QuotaConfig, cost: Cost, now_s: float
    ) -> Verdict:
        return noted("send", send(self, key, quota, cost, now_s))

    def receive_noted(self: QuotaBuckets, key: str, quota: QuotaConfig, now_s: float) -> Verdict:
        return noted("receive", receive(self, key, quota, now_s))

    monkeypatch.setattr(QuotaBuckets, "send", send_noted)
    monkeypatch.setattr(QuotaBuckets, "receive", receive_noted)

    def prepare(world: World) -> None:
        world.nursery.start_soon(world.client("operator").run, slow_clients_down)

    played = play(PLAN, prepare=prepare)
    assert played.is_valid, played.verdict.reason
    assert played.operations["send_ok"] > 50
    for how in ("send passes", "send waits", "send refused", "receive waits"):
        assert verdicts[how] >= 5, verdicts
