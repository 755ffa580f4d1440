"""What a network of the run's own is configured with, and which ones have no owner any more."""

from __future__ import annotations

import os

import pytest

from dledger.jepsen_like.chaos.namespaces import (
    HOSTS_MAX,
    RunNetwork,
    is_left_over,
    name_prefix,
    process_start,
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


def test_network_of_an_ended_process_is_left_over() -> None:
    starts = {70: 5_000}.get
    assert is_left_over(name_prefix(71, 4_000, 0) + "n0", starts)
    assert is_left_over(name_prefix(70, 4_000, 0) + "router", starts)
    assert not is_left_over(name_prefix(70, 5_000, 3) + "n0", starts)


@pytest.mark.parametrize(
    "name", ["chaos", "chaos-monkey", "blue-71-4000-0-n0", "chaos-x-4000-0-n0", "chaos-71-4000-n0"]
)
def test_namespaces_of_others_are_left_alone(name: str) -> None:
    assert not is_left_over(name, lambda pid: None)


def test_a_process_has_one_start_and_a_missing_one_none() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None
    assert process_start(os.getpid()) != process_start(1) or os.getpid() == 1
    assert process_start(1 << 30) is None


def test_every_host_has_two_addresses_and_a_namespace_of_its_own() -> None:
    hosts = list(RunNetwork("chaos-1-2-3-", ["n0", "ns0", "clients"]).hosts.values())
    reported = [address for host in hosts for address in (host.address, host.watch_address)]
    assert len(set(reported)) == 6
    assert [host.namespace and host.namespace.name for host in hosts] == [
        "chaos-1-2-3-n0",
        "chaos-1-2-3-ns0",
        "chaos-1-2-3-clients",
    ]


def test_too_many_hosts_are_refused_first() -> None:
    with (
        pytest.raises(FaultError, match=f"{HOSTS_MAX} at most"),
        run_network([f"n{n}" for n in range(HOSTS_MAX + 1)]),
    ):
        pass
