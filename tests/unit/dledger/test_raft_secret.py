"""`dledger raft secret` makes what a group starts with, and pages name it where they must."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
import trio

from dledger.cli.main import main
from dledger.commitlog.disk import OsDisk
from dledger.output import ExitCode
from dledger.raft.identity import GroupSecret
from dledger.settings.config import BrokerConfig, load_config
from dledger.settings.parts import group_secret
from dledger.settings.schema import ConfigFile
from tests.harness.groups import Groups
from tests.harness.shipped_files import ROOT


def made(path: Path) -> GroupSecret:
    """Return what a broker reads from the file that the command writes."""
    assert main(["raft", "secret", str(path)]) == ExitCode.OK
    config = load_config(options={"raft.secret_file": str(path)})
    secret = group_secret(config, OsDisk())
    assert secret is not None
    return secret


async def test_a_group_starts_with_the_secret_of_the_command(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    groups = Groups(tmp_path, nursery)
    file = tmp_path / "peers.secret"
    secret = made(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    groups.secrets = dict.fromkeys(groups.names, secret)
    for name in groups.names:
        await groups.start(name)
    leader = await groups.leader()
    await trio.sleep(2)
    rows = leader.group.status()["peers"].values()
    assert [row["connected"] for row in rows] == [True, True]


def test_each_run_of_the_command_makes_another_secret(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        made(file)
    one, two = (file.read_text().strip() for file in files)
    assert one != two
    assert min(len(one), len(two)) >= 32


def test_a_secret_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.secret"
    made(file)
    before = file.read_bytes()
    assert main(["raft", "secret", str(file)]) == ExitCode.USAGE
    assert file.read_bytes() == before
    said = capsys.readouterr()
    assert "exists already" in said.err
    assert before.decode().strip() not in said.out + said.err


# -- examples on pages ---------------------------------------------------------------------

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```(?:text|toml|properties|ini|conf)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PEERS = re.compile(r"^(dLegerPeers|peers|raft\.peers)\s*=", re.MULTILINE)


def examples() -> list[tuple[str, str]]:
    """Return page and text of every block that is a broker's configuration with members."""
    found = [
        (page.relative_to(ROOT).as_posix(), block)
        for page in PAGES
        for block in _BLOCK.findall(page.read_text())
        if _PEERS.search(block)
    ]
    shipped = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".conf", ".toml")]
    found += [
        (path.relative_to(ROOT).as_posix(), text)
        for path in sorted(shipped)
        if _PEERS.search(text := path.read_text())
    ]
    return found


def loaded(text: str) -> BrokerConfig:
    suffix = "conf" if "dLegerPeers" in text else "toml"
    return load_config([ConfigFile(f"example.{suffix}", text)])


def test_every_example_of_members_is_taken_by_a_broker() -> None:
    configs = {where: loaded(text) for where, text in examples()}
    assert "docs/operate/from-master-slave.md" in configs
    assert len(configs) >= 10
    far = {
        where: config.raft.secret_file
        for where, config in configs.items()
        if any(not peer.host.startswith("127.") for peer in config.raft.peers)
    }
    assert far == {"docs/operate/from-master-slave.md": "/etc/dledger/broker-a.secret"}
