"""What a local cluster writes before it starts anything."""

import os
import signal
from pathlib import Path

import pytest

from dledger.cli.local_cluster import held, lay_out, local_cluster
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.segment import LogFormat, check_format
from dledger.commitlog.store_paths import StorePaths
from dledger.output import CliError
from dledger.settings.config import SEGMENT_SIZE, load_config, with_stored_sizes
from dledger.settings.schema import ConfigFile

pytestmark = pytest.mark.real_time


def test_each_broker_gets_its_file_and_folder(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, brokers=3, settings={"raft.election_timeout_ms": 500})
    configs = []
    for name, node in cluster.brokers.items():
        assert node.config_path is not None
        config = load_config([ConfigFile(name + ".toml", node.config_path.read_text())])
        assert config.raft.self_id == name
        assert config.advertised_address == node.address
        assert config.store.path_root_dir == str(node.store_path)
        assert config.raft.election_timeout_ms == 500
        assert config.broker.namesrv_addr == (cluster.namesrv_address,)
        configs.append(config)
    assert len({config.store.path_root_dir for config in configs}) == 3
    assert len({config.raft.peers for config in configs}) == 1
    assert [peer.id for peer in configs[0].raft.peers] == ["n0", "n1", "n2"]


def test_setting_that_toml_cannot_hold_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(CliError) as caught:
        lay_out(tmp_path, settings={"broker.cluster_name": 'a"b'})
    assert caught.value.exit_code == 2


def test_a_folder_used_again_keeps_its_ports(tmp_path: Path) -> None:
    first = lay_out(tmp_path, brokers=3)
    second = lay_out(tmp_path, brokers=3)
    assert [node.address for node in second.nodes] == [node.address for node in first.nodes]
    assert (tmp_path / "n1.toml").read_text().count(first.brokers["n1"].address[10:]) == 1


def test_segments_have_the_size_of_the_store_there_is(tmp_path: Path) -> None:
    disk, root = OsDisk(), tmp_path / "n0" / "store"
    check_format(disk, StorePaths(str(root)), LogFormat(1 << 20, 1024))
    cluster = lay_out(tmp_path, brokers=2, settings={SEGMENT_SIZE: 64 << 20})
    for node in cluster.brokers.values():
        assert node.config_path is not None
        config = load_config([ConfigFile.read(node.config_path)])
        assert config.store.mapped_file_size_commit_log == 1 << 20
    # One that is set and differs is refused when the store is opened.
    for set_, size in (({}, 1 << 20), ({SEGMENT_SIZE: str(2 << 20)}, 2 << 20)):
        config = load_config([], options={"store.path_root_dir": str(root), **set_})
        assert with_stored_sizes(config, disk).store.mapped_file_size_commit_log == size


async def test_a_folder_in_use_stays_as_it_is(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(CliError, match=r"runs in .* none of its files was touched"):
        async with local_cluster(tmp_path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


async def test_node_ending_names_signal_or_status(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, brokers=1)
    node = cluster.namesrv
    await cluster.start(node.name)
    await cluster.kill(node.name)
    assert node.ending == "by SIGKILL"
    node.arguments = ("namesrv", "-c", str(tmp_path / "none.toml"))
    await cluster.start(node.name)
    assert node.process is not None
    await node.process.ended()
    assert node.ending.startswith("with status 2: error:")
    assert node.failure.startswith("error:")


async def test_children_end_with_their_fork_server(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, brokers=1)
    await cluster.start("namesrv")
    process = cluster.namesrv.process
    assert process is not None
    server = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    await process.ended()
    assert cluster.namesrv.ending == "by SIGKILL"
    await cluster.start("namesrv")
    assert cluster.namesrv.running
    await cluster.stop("namesrv")
