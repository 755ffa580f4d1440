"""``dledger config``: settings of several daemons beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from dledger.cli import ask_cluster
from dledger.cli.ask_cluster import rows_of
from dledger.cli.config_command import differing
from dledger.cli.main import main
from dledger.own_keys import OWN_KEYS
from dledger.remoting.properties import read_properties
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.own_fields import (
    CONFIRMED_FIELD,
    GIVES_UP_FIELD,
    TOPICS_SHOWN,
    GivenUp,
    decode_given_up,
    given_up,
)
from dledger.settings_tables import ROCKETMQ_KEYS, SETTINGS

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
    named = {ROCKETMQ_KEYS.get(key, key) for key in OWN_KEYS}
    assert named <= {*SETTINGS, "brokerId"}


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

    monkeypatch.setattr(ask_cluster, "ask", ask)
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


def test_unknown_key_is_a_usage_error(
    asked: list[tuple[str, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "get", "nonsense", *BOTH]) == 2
    assert "no daemon has a setting nonsense" in capsys.readouterr().err


def test_refusal_is_shown_and_others_are_asked(
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


@pytest.mark.parametrize("broker", ["", "nan", "a:b", "a:1;b:2", "a:70000"])
@pytest.mark.parametrize("command", [["get"], ["diff"], ["set", "brokerPermission=4"]])
def test_a_broker_that_is_no_address_is_a_usage_error(
    asked: list[tuple[str, int, bytes]],
    command: list[str],
    broker: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", *command, "--broker", A, f"--broker={broker}"]) == 2
    assert f"error: --broker: {broker!r} is not host:port" in capsys.readouterr().err
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


def lost(messages: int) -> GivenUp:
    return GivenUp(change="store.keep_bytes = 1 (now 0)", segments=2, messages={"T": messages})


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Two brokers that want to hear that messages may go."""
    calls: list[tuple[str, bool]] = []

    async def ask(
        address: str, code: int, ext: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        is_confirmed = bool(ext) and (ext or {}).get(CONFIRMED_FIELD) == "true"
        calls.append((address, is_confirmed))
        if is_confirmed:
            return response_to(request(code), 0)
        fields = {GIVES_UP_FIELD: lost(180 if address == A else 179).encode()}
        return response_to(request(code), 1, "gives up messages", fields)

    monkeypatch.setattr(ask_cluster, "ask", ask)
    return calls


def test_what_would_go_is_shown_and_nothing_is_changed(
    careful: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "store.keep_bytes=1", *BOTH]) == 0
    shown = capsys.readouterr()
    assert careful == [(A, False), (B, False)]
    (row,) = [line for line in shown.out.splitlines() if A in line]
    assert ("T" in row, "180" in row) == (True, True)
    assert "not changed; --yes does it" in shown.err
    assert "changed\n" not in shown.err.replace("not changed", "")
    assert main(["config", "set", "store.keep_bytes=1", *BOTH, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {address: plan["messages"] for address, plan in found.items()} == {
        A: {"T": 180},
        B: {"T": 179},
    }


def test_yes_confirms_it_after_it_was_shown(
    careful: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "store.keep_bytes=1", *BOTH, "--yes"]) == 0
    shown = capsys.readouterr()
    assert careful == [(A, False), (B, False), (A, True), (B, True)]
    assert "180" in shown.out
    assert f"{A}: changed" in shown.err
    assert f"{B}: changed" in shown.err


def test_topics_are_named_up_to_a_limit_and_the_others_summed_up() -> None:
    many = {f"t{number:03}": number + 1 for number in range(TOPICS_SHOWN + 2)}
    found = given_up("x", many)
    assert len(found.messages) == TOPICS_SHOWN
    assert (found.other_topics, found.other_messages) == (2, 1 + 2)
    assert found.total == sum(many.values())
    assert decode_given_up(found.encode()) == found
    assert rows_of({"a:1": found})[-1] == {"broker": "a:1", "topic": "(2 more)", "messages": 3}
