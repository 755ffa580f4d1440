"""``dledger acl``: accounts are changed in the file, and secrets stay where they belong."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.remoting.access.account_file import parse_accounts
from dledger.remoting.access.accounts import Permission, group_right, topic_right

PUB, SUB = Permission.PUB, Permission.SUB


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "accounts.toml"
    monkeypatch.setenv("DLEDGER_ACL_FILE", str(path))
    return path


def added(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["acl", "add", "order-service", *options]) == 0
    return capsys.readouterr().out.strip()


def test_an_account_is_added_with_a_secret_of_its_own(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = added(capsys, "--topic", "orders=PUB|SUB", "--topic", "a=b=DENY", "--group", "g=SUB")
    (account,) = parse_accounts(str(file), file.read_bytes())
    assert len(secret) >= 32
    assert account.secret_key == secret
    assert account.topics == {"orders": PUB | SUB, "a=b": Permission.DENY}
    assert account.groups == {"g": SUB}
    assert not account.is_admin
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_secret_may_come_from_a_file_and_is_not_printed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    assert added(capsys, "--secret-file", str(tmp_path / "secret"), "--admin") == ""
    (account,) = parse_accounts(str(file), file.read_bytes())
    assert (account.secret_key, account.is_admin) == ("from a file", True)


def test_lists_show_everything_but_secrets(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = added(capsys, "--topic", "orders=PUB", "--white", "10.0.0.*")
    for form in ("table", "json"):
        assert main(["acl", "ls", "--output", form]) == 0
        out = capsys.readouterr().out
        assert "order-service" in out
        assert "orders=PUB" in out
        assert "10.0.0.*" in out
        assert secret not in out


def test_lines_are_granted_and_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = added(capsys, "--topic", "orders=PUB")
    assert main(["acl", "grant", "order-service", "--topic", "orders=SUB", "--group", "g=SUB"]) == 0
    (account,) = parse_accounts(str(file), file.read_bytes())
    assert account.allows(topic_right("orders", SUB))
    assert not account.allows(topic_right("orders", PUB))
    assert account.allows(group_right("g"))
    assert main(["acl", "revoke", "order-service", "--topic", "orders", "--group", "g"]) == 0
    (account,) = parse_accounts(str(file), file.read_bytes())
    assert (account.topics, account.groups, account.secret_key) == ({}, {}, secret)
    assert main(["acl", "rm", "order-service"]) == 0
    assert len(parse_accounts(str(file), file.read_bytes())) == 0


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--topic", "orders", "--permission", "PUB"], 0, "order-service may PUB topic orders"),
        (["--topic", "orders"], 1, "order-service may not SUB topic orders"),
        (["--group", "g"], 1, "order-service may not SUB group g"),
        (["--topic", "%RETRY%g"], 1, "may not SUB group g"),
        ([], 2, "nothing to check"),
    ],
)
def test_acl_check_shows_the_decision(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], status: int, text: str
) -> None:
    added(capsys, "--topic", "orders=PUB")
    assert main(["acl", "check", "order-service", *options]) == status
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "status", "text"),
    [
        (["add", "order-service"], 1, "account order-service exists already"),
        (["add", ""], 2, "has a name"),
        (["add", "someone-else", "--topic", "T"], 2, "'T' is not NAME=PERMISSION"),
        (["add", "someone-else", "--topic", "T=WRITE"], 2, "is not DENY, PUB, SUB or PUB|SUB"),
        (["add", "someone-else", "--white", "10.0.0"], 2, "--white: '10.0.0' is not an address"),
        (["grant", "order-service"], 2, "nothing to grant"),
        (["grant", "stranger", "--topic", "T=PUB"], 1, "account stranger does not exist"),
        (["revoke", "order-service", "--topic", "T"], 1, "the account has no line about T"),
        (["rm", "stranger"], 1, "account stranger does not exist"),
        (["ls", "--file", "/missing.toml"], 2, "/missing.toml: No such file"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_the_file(
    file: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], status: int, text: str
) -> None:
    added(capsys)
    before = file.read_bytes()
    assert main(["acl", *tokens]) == status
    assert text in capsys.readouterr().err
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["accounts.toml"]


def test_a_file_keeps_the_mode_it_had(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added(capsys)
    file.chmod(0o640)
    assert main(["acl", "rm", "order-service"]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_rocketmqs_file_is_read_and_converted_but_never_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml, toml = tmp_path / "plain_acl.yml", tmp_path / "accounts.toml"
    yaml.write_text("accounts:\n- accessKey: RocketMQ\n  secretKey: 12345678\n  admin: true\n")
    assert main(["acl", "check", "--file", str(yaml)]) == 0
    assert "1 accounts" in capsys.readouterr().err
    assert main(["acl", "rm", "RocketMQ", "--file", str(yaml)]) == 2
    assert "only .toml files are written; dledger acl convert" in capsys.readouterr().err
    assert main(["acl", "convert", str(yaml), str(toml)]) == 0
    (account,) = parse_accounts(str(toml), toml.read_bytes())
    assert (account.access_key, account.secret_key, account.is_admin) == (
        "RocketMQ",
        "12345678",
        True,
    )
    assert main(["acl", "convert", str(yaml), str(toml)]) == 2
