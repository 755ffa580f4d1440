"""Clients that mean harm, on the client ports of three brokers and a NameServer under light load.

Default limits throughout; only the files are smaller. What is compared is measured beside it: the
latency of a client and the memory of a process before and during an attack.
"""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from tests.harness.attacked import HUNG_S, QUIET_SENDS, attacked
from tests.harness.local_settings import SMALL_FILES

pytestmark = [pytest.mark.slow, pytest.mark.hunt]

ATTACKS = ("half-frames", "whole-frames", "idle", "mutate")

TIMES_QUIET = 5

ROUNDS = 3
"""What else the machine does changes, and takes part in one of them."""


@asynccontextmanager
async def attack(kind: str, *addresses: str) -> AsyncIterator[Callable[[], dict[str, int]]]:
    """Run an attacker while the block runs; yield its report, complete once it is over."""
    done: dict[str, int] = {}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.harness.attacker", kind, *addresses], stdin=-1, stdout=-1
    )
    assert process.stdin
    assert process.stdout
    try:
        first = bytearray()
        while b"\n" not in first:
            data = await process.stdout.receive_some()
            assert data, "the attacker ended early"
            first += data
        yield lambda: done
        await process.stdin.aclose()
        rest = bytearray()
        async for data in process.stdout:
            rest += data
        done.update(json.loads(rest.splitlines()[-1]))
        await process.wait()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def new_client_gets_in(cluster: LocalCluster) -> None:
    async with connect([cluster.namesrv_address]) as client, Producer(client, "new") as producer:
        await producer.send(Message("load", b"new"))


async def test_hostile_clients_end_nothing_and_slow_others_little(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        leader = cluster.brokers[await cluster.wait_leader()]
        addresses = (leader.address, cluster.namesrv_address)
        times_quiet: dict[str, list[float]] = {name: [] for name in ATTACKS}
        reports: dict[str, dict[str, int]] = {}
        with trio.fail_after(HUNG_S):
            async with attacked(cluster) as load:
                for name in (name for _ in range(ROUNDS) for name in ATTACKS):
                    if times_quiet[name] and min(times_quiet[name]) <= TIMES_QUIET:
                        continue
                    before_s = await load.p99_s(QUIET_SENDS)
                    async with attack(name, *addresses) as done:
                        slow_s = await load.p99_s(QUIET_SENDS)
                        await new_client_gets_in(cluster)
                    reports[name] = done()
                    quiet_s = max(before_s, await load.p99_s(QUIET_SENDS))
                    times_quiet[name].append(slow_s / quiet_s)
        assert reports["half-frames"]["mib"] >= 32
        assert reports["idle"]["opened"] == 2 * 4_096
        assert reports["mutate"]["frames"] >= 20_000
        assert reports["mutate"]["answers"] > 100
        assert all(min(times) <= TIMES_QUIET for times in times_quiet.values()), times_quiet
