"""`dledger context`: names for clusters, kept for their owner alone, without secrets."""

import json
import os
from pathlib import Path

import pytest

from dledger.cli.contexts import contexts_file, read_contexts, use_context
from dledger.cli.main import main, run_with_context
from dledger.commitlog.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for settings of its own; nothing is set otherwise."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("NAMESRV_ADDR", "DLEDGER_CREDENTIALS", "DLEDGER_TLS_CA_FILE"):
        # Set first, so that what a command leaves there is removed at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def add(name: str, namesrv: str, *more: str) -> None:
    assert main(["context", "add", name, "--namesrv", namesrv, *more]) == 0


def test_the_first_context_is_used_until_another_is_chosen(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("here", "127.0.0.1:9876")
    add("there", "10.0.0.1:9876;10.0.0.2:9876")
    assert main(["context", "use", "there"]) == 0
    capsys.readouterr()
    assert main(["context", "ls", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["in_use"]) for row in rows] == [("here", False), ("there", True)]
    assert main(["context", "rm", "there"]) == 0
    assert read_contexts(contexts_file(os.environ)).current == ""


def test_only_the_owner_reads_the_file_and_no_secret_is_in_it(home: Path) -> None:
    account = home / "operator.toml"
    account.write_text('access_key = "operator"\nsecret_key = "hidden"\n')
    add("here", "h:1", "--credentials", str(account))
    file = contexts_file(os.environ)
    assert file == home / "dledger" / "contexts.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hidden" not in file.read_text()
    assert str(account) in file.read_text()


def test_commands_that_ask_a_cluster_use_the_context(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("here", "127.0.0.1:1")
    assert main(["cluster", "ls"]) == 3
    assert "no connection to 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["broker", "namesrv", "up", "bench", "context"])
def test_daemons_and_measurements_use_no_context(name: str, home: Path) -> None:
    add("here", "127.0.0.1:1")
    environment = {"XDG_CONFIG_HOME": str(home)}
    run_with_context([name], environment)
    assert environment == {"XDG_CONFIG_HOME": str(home)}


def test_the_environment_comes_before_a_context(home: Path) -> None:
    add("here", "h:1", "--credentials", str(home / "a"))
    named = {"XDG_CONFIG_HOME": str(home), "NAMESRV_ADDR": "other:1"}
    use_context(named)
    assert "DLEDGER_CREDENTIALS" not in named
    signed = {"XDG_CONFIG_HOME": str(home), "DLEDGER_CREDENTIALS": "mine"}
    use_context(signed)
    assert (signed["NAMESRV_ADDR"], signed["DLEDGER_CREDENTIALS"]) == ("h:1", "mine")


@pytest.mark.parametrize(
    ("tokens", "is_used"),
    [
        (["topic", "ls"], True),
        (["topic", "ls", "--namesrv", "other:1"], False),
        (["topic", "ls", "--namesrv=other:1"], False),
        (["topic", "ls", "-n", "other:1"], False),
        (["topic", "ls", "-n=other:1"], False),
        (["msg", "send", "T", "--", "-n"], True),
    ],
)
def test_named_servers_get_no_account_of_a_context(
    tokens: list[str], is_used: bool, home: Path
) -> None:
    add("here", "h:1", "--credentials", str(home / "a"))
    environment = {"XDG_CONFIG_HOME": str(home)}
    run_with_context(tokens, environment)
    assert ("DLEDGER_CREDENTIALS" in environment) is is_used


@pytest.mark.parametrize(
    ("tokens", "status", "text"),
    [
        (["use", "nowhere"], 1, "there is no context nowhere"),
        (["rm", "nowhere"], 1, "there is no context nowhere"),
        (["add", "bad", "--namesrv", "nonsense"], 2, "is not host:port"),
    ],
)
def test_contexts_that_cannot_be_are_refused(
    tokens: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", *tokens]) == status
    assert text in capsys.readouterr().err


def test_a_damaged_file_is_named(home: Path) -> None:
    file = contexts_file(os.environ)
    file.parent.mkdir()
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"contexts\.json"):
        use_context({"XDG_CONFIG_HOME": str(home)})
    file.write_text('{"current": "x"}')
    with pytest.raises(ConfigError, match="there is no context x"):
        use_context({"XDG_CONFIG_HOME": str(home)})
