"""Which node gets which address: every way between two names leads over a link the runner owns."""

import tomllib
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dledger.jepsen_like.chaos.cluster import CLIENTS, ChaosCluster, lay_out
from dledger.jepsen_like.chaos.namespaces import RunNetwork
from dledger.jepsen_like.plans.plan import Plan, Settings, Workload

PLAN = Plan(
    seed=1, duration_ms=1_000, members=3, name_servers=2, settings=Settings(register_ms=5_000)
)


def reported(cluster: ChaosCluster, name: str) -> dict[str, Any]:
    """Return what a process finds in its configuration."""
    node = cluster.name_servers.get(name) or cluster.brokers[name]
    assert node.config_path is not None
    return tomllib.loads(node.config_path.read_text())


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_proxy_links_every_broker_and_name_server(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, PLAN)
    targets = cluster.targets()
    for name in cluster.brokers:
        dialled = [
            targets[port_of(address)]
            for address in reported(cluster, name)["broker"]["namesrv_addr"].split(";")
        ]
        assert [(target.source, target.name) for target in dialled] == [
            (name, "ns0"),
            (name, "ns1"),
        ]
        for target in dialled:
            assert target.port == reported(cluster, target.name)["server"]["listen_port"]
    of_clients = [targets[port_of(address)] for address in cluster.namesrv_addresses]
    assert [(target.source, target.name) for target in of_clients] == [
        (CLIENTS, "ns0"),
        (CLIENTS, "ns1"),
    ]
    bound = {target.port for target in targets.values()}
    assert not bound & set(targets), "a process is given a port that another one has bound"


def test_proxy_hides_real_ports(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, PLAN)
    targets = cluster.targets()
    for name in cluster.brokers:
        settings = reported(cluster, name)
        peers = [targets[port_of(peer)] for peer in settings["raft"]["peers"].split(";")]
        assert [(peer.name, peer.source) for peer in peers] == [
            (other, None) for other in cluster.brokers
        ]
        advertised = targets[settings["broker"]["advertised_port"]]
        assert (advertised.name, advertised.source) == (name, CLIENTS)
        assert advertised.port == settings["server"]["listen_port"]


def test_own_network_uses_real_ports(tmp_path: Path) -> None:
    names = ("n0", "n1", "n2", "ns0", "ns1", CLIENTS)
    hosts = RunNetwork(Path("router"), {name: Path(name) for name in names}).hosts
    cluster = lay_out(tmp_path, PLAN, hosts=hosts)
    for name, node in cluster.brokers.items():
        settings, host = reported(cluster, name), hosts[name]
        ports = cluster.ports[name]
        assert settings["broker"]["broker_ip1"] == host.address
        assert settings["broker"]["advertised_port"] == settings["server"]["listen_port"]
        assert settings["broker"]["namesrv_addr"] == ";".join(cluster.namesrv_addresses)
        assert f"{name}-{host.address}:{ports.peer}" in settings["raft"]["peers"].split(";")
        assert settings["raft"]["listen_port"] == ports.peer
        assert node.address == f"{host.watch_address}:{ports.client}"
        assert node.module == "dledger.jepsen_like.chaos.namespaces"
        assert node.arguments[:2] == (str(host.namespace), "dledger.jepsen_like.chaos.broker_child")
    assert [address.partition(":")[0] for address in cluster.namesrv_addresses] == [
        hosts["ns0"].address,
        hosts["ns1"].address,
    ]


def test_name_servers_unlist_after_four_registrations(tmp_path: Path) -> None:
    settings = reported(lay_out(tmp_path, PLAN), "ns1")["namesrv"]
    assert settings["broker_expiry_ms"] == 20_000
    assert settings["scan_interval_ms"] < 5_000


def test_broker_is_ahead_from_its_next_start(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, PLAN)
    assert cluster.brokers["n1"].arguments[2:] == ("0",)
    cluster.be_ahead("n1", 1)
    assert cluster.brokers["n1"].arguments[2:] == ("1",)
    assert cluster.brokers["n0"].arguments[2:] == ("0",)
    cluster.be_ahead("n1", 0)
    assert cluster.brokers["n1"].arguments[2:] == ("0",)


def test_lay_out_starts_brokers_from_another_tree(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, PLAN, tree=tmp_path / "tree")
    assert {node.tree for node in cluster.brokers.values()} == {tmp_path / "tree"}
    assert {node.tree for node in cluster.name_servers.values()} == {None}


def test_proxies_are_clients_of_the_cluster(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, replace(PLAN, workload=Workload(delayed_per_mille=0, proxies=2)))
    assert list(cluster.proxies) == ["proxy0", "proxy1"]
    assert cluster.nodes[-2:] == list(cluster.proxies.values())
    for node in cluster.proxies.values():
        options = dict(zip(node.arguments[1::2], node.arguments[2::2], strict=True))
        assert options["--listen"] == node.address
        assert tuple(options["--namesrv"].split(";")) == cluster.namesrv_addresses
    assert len({node.address for node in cluster.proxies.values()}) == 2
    assert lay_out(tmp_path, PLAN).proxies == {}
