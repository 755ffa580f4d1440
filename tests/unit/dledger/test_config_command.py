"""``dledger config``: settings of several daemons beside each other."""

from __future__ import annotations

import pytest

from dledger.cli import config_command
from dledger.cli.config_command import OWN_KEYS, differing
from dledger.cli.main import main
from dledger.settings_tables import ROCKETMQ_KEYS, SETTINGS
from remoting.java_properties import read_properties
from remoting.protocol.command import RemotingCommand, request, response_to

A, B = "127.0.0.1:10911", "127.0.0.1:10921"


def test_settings_differ_where_two_do_not_agree() -> None:
    found = {
        A: {"brokerPermission": "6", "listenPort": "1", "same": "x", "newer": "1"},
        B: {"brokerPermission": "4", "listenPort": "2", "same": "x"},
    }
    assert differing(found, with_own=False) == {
        "brokerPermission": {A: "6", B: "4"},
        "newer": {A: "1", B: None},
    }
    assert differing(found, with_own=True)["listenPort"] == {A: "1", B: "2"}


def test_keys_of_ones_own_exist() -> None:
    assert {ROCKETMQ_KEYS.get(key, key) for key in OWN_KEYS} <= set(SETTINGS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bytes]]:
    """Two daemons that answer; the second refuses changes."""
    calls: list[tuple[str, int, bytes]] = []
    texts = {A: b"brokerPermission=6\nlistenPort=1\n", B: b"brokerPermission=4\nlistenPort=2\n"}

    async def ask(
        address: str, code: int, ext: object = None, body: bytes = b""
    ) -> RemotingCommand:
        calls.append((address, int(code), body))
        if code in (25, 318) and address == B:
            return response_to(request(code), 1, "listenPort cannot change")
        return response_to(request(code), 0, None, {}, texts[address])

    monkeypatch.setattr(config_command, "ask", ask)
    return calls


BOTH = ["--broker", A, "--broker", B]


def test_settings_are_shown_of_every_broker(
    asked: list[tuple[str, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "get", "brokerPermission", *BOTH, "-o", "json"]) == 0
    out = capsys.readouterr().out
    assert out.count('"brokerPermission"') == 2
    assert "listenPort" not in out
    assert sorted(asked) == [(A, 26, b""), (B, 26, b"")]


def test_a_key_that_nobody_has_is_a_usage_error(
    asked: list[tuple[str, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "get", "nonsense", *BOTH]) == 2
    assert "no daemon has a setting nonsense" in capsys.readouterr().err


def test_a_refusal_is_told_and_the_others_are_still_asked(
    asked: list[tuple[str, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "brokerPermission=4", "deleteWhen=01=2", *BOTH]) == 1
    error = capsys.readouterr().err
    assert f"{A}: changed" in error
    assert f"error: {B}: listenPort cannot change (code 1" in error
    assert [(address, code) for address, code, _ in asked] == [(A, 25), (B, 25)]
    assert read_properties(asked[0][2].decode()) == {"brokerPermission": "4", "deleteWhen": "01=2"}


@pytest.mark.parametrize("tokens", [["config", "set", *BOTH], ["config", "set", "x", *BOTH]])
def test_a_change_without_a_value_is_a_usage_error(
    asked: list[tuple[str, int, bytes]], tokens: list[str]
) -> None:
    assert main(tokens) == 2
    assert asked == []


def test_a_difference_is_status_1(
    asked: list[tuple[str, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "diff", *BOTH]) == 1
    out = capsys.readouterr().out
    assert "brokerPermission" in out
    assert "listenPort" not in out
    assert main(["config", "diff", "--broker", A]) == 0


def test_name_servers_are_asked_instead(asked: list[tuple[str, int, bytes]]) -> None:
    assert main(["config", "get", "--name-servers", "--namesrv", A]) == 0
    assert main(["config", "set", "brokerPermission=1", "--name-servers", "--namesrv", A]) == 0
    assert [(address, code) for address, code, _ in asked] == [(A, 319), (A, 318)]
