"""``dledger acl``: accounts of a file, and in the log of broker groups."""

import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.main import main
from dledger.client.core.errors import RequestFailedError
from dledger.remoting.access.account_file import parse_accounts
from dledger.remoting.access.accounts import Permission, group_right, topic_right
from dledger.remoting.protocol.access_bodies import AclConfig, PlainAccessConfig, UserInfo

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


NAME = "order-service"
GROUPS = ("broker-a", "broker-b")


class Clusters:
    """Accounts of two broker groups; a group of *refusing* takes no change."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, PlainAccessConfig]] = {name: {} for name in GROUPS}
        self.secrets: dict[str, str] = {}
        self.refusing = ""

    def have(self, broker: str, **fields: Any) -> None:
        self.rows[broker][NAME] = PlainAccessConfig(access_key=NAME, **fields)

    def _reach(self, broker: str) -> None:
        if broker == self.refusing:
            raise RequestFailedError(f"put account {NAME} on {broker}: refused", code=1)

    async def accounts(self) -> dict[str, AclConfig]:
        return {
            name: AclConfig(plain_access_configs=list(rows.values()))
            for name, rows in self.rows.items()
        }

    async def users(self) -> dict[str, list[UserInfo]]:
        return {}

    async def policies(self) -> dict[str, Any]:
        return {}

    async def put_account(
        self, name: str, *, broker_names: tuple[str, ...] = GROUPS, **fields: Any
    ) -> None:
        for broker in broker_names:
            self._reach(broker)
            self.secrets[broker] = fields.get("secret_key", "")
            topics = [f"{topic}={text}" for topic, text in fields["topics"].items()]
            self.rows[broker][name] = PlainAccessConfig(access_key=name, topic_perms=topics)

    async def update_user(self, name: str, *, password: str) -> None:
        for broker in GROUPS:
            self._reach(broker)
            self.secrets[broker] = password

    def lines(self, broker: str) -> list[str]:
        return self.rows[broker][NAME].topic_perms


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    made = Clusters()

    for module in ("acl_command", "commands"):
        monkeypatch.setattr(f"dledger.cli.{module}.open_admin", lambda _: nullcontext(made))
    return made


@pytest.mark.parametrize("refusing", ["", "broker-b"])
@pytest.mark.parametrize("command", [("add", "--cluster"), ("secret",)])
def test_a_drawn_secret_is_printed_where_a_group_has_it(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], refusing: str
) -> None:
    """The first group has it when the second one refuses: without it no client signs there."""
    if command == ("secret",):
        for broker in GROUPS:
            clusters.have(broker)
    clusters.refusing = refusing
    assert main(["acl", command[0], NAME, *command[1:]]) == (1 if refusing else 0)
    printed = capsys.readouterr()
    assert printed.out == f"{clusters.secrets['broker-a']}\n"
    assert len(printed.out) > 30
    assert ("may have the secret" in printed.err) == bool(refusing)


def test_a_given_secret_is_not_printed(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2-hunter2\n")
    clusters.refusing = "broker-b"
    assert main(["acl", "add", NAME, "--cluster", "--secret-file", str(file)]) == 1
    printed = capsys.readouterr()
    assert clusters.secrets == {"broker-a": "hunter2-hunter2"}
    assert "hunter2" not in printed.out + printed.err


def test_a_secret_is_drawn_where_each_group_has_the_account(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have("broker-a")
    assert main(["acl", "secret", NAME]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"broker-b: account {NAME} does not exist" in printed.err
    assert clusters.secrets == {}


def test_lines_are_checked_in_each_group_before_a_change(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.have("broker-a", topic_perms=["orders=PUB"])
    clusters.have("broker-b")
    assert main(["acl", "revoke", NAME, "--cluster", "--topic", "orders"]) == 1
    assert "broker-b: the account has no line about orders" in capsys.readouterr().err
    assert clusters.lines("broker-a") == ["orders=PUB"], "nothing is changed in any group"
    del clusters.rows["broker-b"][NAME]
    assert main(["acl", "grant", NAME, "--cluster", "--topic", "bills=SUB"]) == 1
    assert clusters.lines("broker-a") == ["orders=PUB"]
    clusters.have("broker-b", topic_perms=["orders=SUB"])
    assert main(["acl", "revoke", NAME, "--cluster", "--topic", "orders"]) == 0
    assert [clusters.lines(broker) for broker in GROUPS] == [[], []]
