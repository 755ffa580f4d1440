"""The guide to access control: its commands work, its files are read, its code is right."""

import re
import shlex
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.client.core.client_instance import ClientInstance
from dledger.namesrv.config import NamesrvConfig
from dledger.remoting.access.account_file import parse_accounts
from dledger.settings.config import load_config
from dledger.settings.schema import ConfigFile
from tests.harness.shipped_files import ROOT

PAGE = (ROOT / "docs" / "operate" / "access.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(language: str, word: str) -> str:
    (found,) = (str(text) for kind, text in BLOCKS if kind == language and word in text)
    return found


def test_the_commands_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("sh", "DLEDGER_ACL_FILE").splitlines():
        first, *rest = shlex.split(line)
        if first == "export":
            name, _, value = rest[0].partition("=")
            monkeypatch.setenv(name, value)
        else:
            assert first == "dledger"
            assert main(rest) == 0, line
    assert "order-service may PUB topic orders" in capsys.readouterr().err
    operator, service = parse_accounts("accounts.toml", Path("accounts.toml").read_bytes())
    assert (operator.is_admin, service.is_admin) == (True, False)


def test_the_account_file_of_the_page_is_one() -> None:
    accounts = parse_accounts("accounts.toml", block("toml", "[accounts").encode())
    assert [account.access_key for account in accounts] == ["operator", "order-service"]


@pytest.mark.parametrize("word", ["acl_enable", "tls_mode"])
def test_the_settings_of_the_page_are_taken_by_both_daemons(word: str) -> None:
    text = block("toml", word)
    config = load_config([ConfigFile("n0.toml", text)])
    assert config.server.acl_enable or config.server.tls_mode == "permissive"
    names = NamesrvConfig.load([ConfigFile("namesrv.toml", text)])
    assert names.server.acl_enable or names.server.tls_mode == "permissive"


def test_the_code_of_the_page_makes_a_client_that_signs() -> None:
    names: dict[str, object] = {}
    exec(block("python", "Credentials"), names)
    client = names["client"]
    assert isinstance(client, ClientInstance)
    credentials = client.config.credentials
    assert credentials is not None
    assert credentials.access_key == "order-service"
