"""What a network of the run's own is configured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.jepsen_like.chaos.namespaces import (
    HOSTS_MAX,
    RunNetwork,
    rule_lines,
    run_network,
)
from dledger.jepsen_like.nemesis.ground import FaultError

A, B, C = "10.77.1.2", "10.77.2.2", "10.77.3.2"


def test_router_gets_changes_only() -> None:
    assert rule_lines((), [(A, B)]) == [f"rule add priority 10 from {A} to {B} blackhole"]
    assert rule_lines([(A, B), (B, C)], [(B, C), (B, A)]) == [
        f"rule del priority 10 from {A} to {B} blackhole",
        f"rule add priority 10 from {B} to {A} blackhole",
    ]
    assert rule_lines([(A, B)], [(A, B)]) == []
    assert rule_lines([(A, B)], ()) == [f"rule del priority 10 from {A} to {B} blackhole"]


def test_every_host_has_two_addresses_and_a_namespace_of_its_own() -> None:
    files = {name: Path(name) for name in ("n0", "ns0", "clients")}
    hosts = RunNetwork(Path("router"), files).hosts
    reported = [at for host in hosts.values() for at in (host.address, host.watch_address)]
    assert len(set(reported)) == 6
    assert {name: host.namespace for name, host in hosts.items()} == files


def test_too_many_hosts_are_refused_first() -> None:
    with (
        pytest.raises(FaultError, match=f"{HOSTS_MAX} at most"),
        run_network([f"n{n}" for n in range(HOSTS_MAX + 1)]),
    ):
        pass
