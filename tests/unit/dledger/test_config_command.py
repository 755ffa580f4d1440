"""``dledger config``: settings of several daemons beside each other.

``dledger topic retention`` and ``update``: what would go is shown, and goes with --yes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

import pytest

from dledger.cli.commands import rows_of
from dledger.cli.config_command import differing
from dledger.cli.main import main
from dledger.client.core.errors import ClientError, ConfirmationNeededError, RequestFailedError
from dledger.client.core.route import TopicRoute
from dledger.remoting.protocol.own_fields import TOPICS_SHOWN, GivenUp, decode_given_up, given_up
from dledger.settings.config import ROCKETMQ_KEYS, SETTINGS
from dledger.settings.text import OWN_KEYS

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


class Daemons:
    """Two daemons, asked through `Admin`; calls have address and changes, None for a look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Mapping[str, str] | None, bool]] = []
        self.refusal: ClientError | None = None
        self.gives_up = False
        self.name_servers: list[str] = []
        monkeypatch.setattr("dledger.cli.commands.open_admin", self._opened)

    def _opened(self, namesrv: str) -> AbstractAsyncContextManager[Daemons]:
        self.name_servers = [namesrv]
        return nullcontext(self)

    async def broker_settings(self, address: str) -> dict[str, str]:
        self.calls.append((address, None, False))
        return {
            A: {"brokerPermission": "6", "listenPort": "1"},
            B: {"brokerPermission": "4", "listenPort": "2"},
        }[address]

    async def change_broker_settings(
        self, address: str, changes: Mapping[str, str], *, gives_up_messages: bool
    ) -> str:
        self.calls.append((address, changes, gives_up_messages))
        if address == B and self.refusal is not None:
            raise self.refusal
        if self.gives_up and not gives_up_messages:
            raise ConfirmationNeededError(
                "no", code=1, remark="", given_up=lost(180 if address == A else 179)
            )
        return ""

    async def name_server_settings(self, address: str) -> dict[str, str]:
        self.calls.append((f"NameServer {address}", None, False))
        return {}

    async def change_name_server_settings(self, address: str, changes: Mapping[str, str]) -> str:
        self.calls.append((f"NameServer {address}", changes, False))
        return "until it stops"


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Daemons:
    return Daemons(monkeypatch)


BOTH = ["--broker", A, "--broker", B]


def test_settings_are_shown_of_every_broker(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "get", "brokerPermission", *BOTH, "-o", "json"]) == 0
    out = capsys.readouterr().out
    assert out.count('"brokerPermission"') == 2
    assert "listenPort" not in out
    assert sorted(address for address, _, _ in daemons.calls) == [A, B]


def test_unknown_key_is_a_usage_error(daemons: Daemons, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "get", "nonsense", *BOTH]) == 2
    assert "no daemon has a setting nonsense" in capsys.readouterr().err


def test_refusal_is_shown_and_others_are_asked(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    daemons.refusal = RequestFailedError(f"{B}: listenPort cannot change", code=1)
    assert main(["config", "set", "brokerPermission=4", "deleteWhen=01=2", *BOTH]) == 1
    error = capsys.readouterr().err
    assert f"{A}: changed" in error
    assert f"error: {B}: listenPort cannot change" in error
    changes = {"brokerPermission": "4", "deleteWhen": "01=2"}
    assert daemons.calls == [(A, changes, False), (B, changes, False)]


@pytest.mark.parametrize("tokens", [["config", "set", *BOTH], ["config", "set", "x", *BOTH]])
def test_a_change_without_a_value_is_a_usage_error(daemons: Daemons, tokens: list[str]) -> None:
    assert main(tokens) == 2
    assert daemons.calls == []


@pytest.mark.parametrize("broker", ["", "nan", "a:b", "a:1;b:2", "a:70000"])
@pytest.mark.parametrize("command", [["get"], ["diff"], ["set", "brokerPermission=4"]])
def test_a_broker_that_is_no_address_is_a_usage_error(
    daemons: Daemons, command: list[str], broker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *command, "--broker", A, f"--broker={broker}"]) == 2
    assert f"error: --broker: {broker!r} is not host:port" in capsys.readouterr().err
    assert daemons.calls == []


def test_a_difference_is_status_1(daemons: Daemons, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "diff", *BOTH]) == 1
    out = capsys.readouterr().out
    assert "brokerPermission" in out
    assert "listenPort" not in out
    assert main(["config", "diff", "--broker", A]) == 0


def test_name_servers_are_asked_instead(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "get", "--name-servers", "--namesrv", A]) == 0
    assert main(["config", "set", "brokerPermission=1", "--name-servers", "--namesrv", A]) == 0
    name = f"NameServer {A}"
    assert daemons.calls == [(name, None, False), (name, {"brokerPermission": "1"}, False)]
    assert f"{A}: until it stops\n{A}: changed\n" in capsys.readouterr().err


def lost(messages: int) -> GivenUp:
    return GivenUp(change="store.keep_bytes = 1 (now 0)", segments=2, messages={"T": messages})


def test_what_would_go_is_shown_and_nothing_is_changed(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    daemons.gives_up = True
    assert main(["config", "set", "store.keep_bytes=1", *BOTH]) == 0
    shown = capsys.readouterr()
    assert [call[::2] for call in daemons.calls] == [(A, False), (B, False)]
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
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    daemons.gives_up = True
    assert main(["config", "set", "store.keep_bytes=1", *BOTH, "--yes"]) == 0
    shown = capsys.readouterr()
    assert [call[::2] for call in daemons.calls] == [(A, False), (B, False), (A, True), (B, True)]
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


LOST = GivenUp(change="orders: retention.ms = 21600000 (now as the log)", messages={"orders": 7})


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Two groups with the topic; the second has messages that would go."""
    taken: list[Mapping[str, str]] = []

    class Groups:
        async def topic_route(self, topic: str) -> TopicRoute:
            return TopicRoute(topic, (), (), {"b": {0: "b:1"}, "a": {0: "a:1"}})

        async def change_topic(
            self, _topic: str, group: str, asked: Mapping[str, str], *, gives_up_messages: bool
        ) -> None:
            if group == "b" and not gives_up_messages and asked.get("attributes", "")[:1] == "+":
                raise ConfirmationNeededError("gives up", code=1, remark="", given_up=LOST)
            taken.append({"group": group, **asked})

    monkeypatch.setattr("dledger.cli.commands.open_admin", lambda _: nullcontext(Groups()))
    return taken


def test_without_yes_only_groups_that_lose_nothing_change(
    changes: list[Mapping[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topic", "retention", "orders", "6h"]) == 0
    assert [change["group"] for change in changes] == ["a"]
    shown = capsys.readouterr()
    (row,) = [line for line in shown.out.splitlines() if "orders" in line]
    assert "7" in row
    assert "orders in b: not changed; --yes does it" in shown.err


def test_with_yes_every_group_changes(changes: list[Mapping[str, str]]) -> None:
    assert main(["topic", "retention", "orders", "6h", "--yes"]) == 0
    assert [change["group"] for change in changes] == ["a", "b"]
    for change in changes:
        assert change["attributes"] == f"+retention.ms={6 * 3_600_000}"


def test_as_long_as_the_log_is_no_loss(changes: list[Mapping[str, str]]) -> None:
    assert main(["topic", "retention", "orders", "none"]) == 0
    assert [change["attributes"] for change in changes] == ["-retention.ms"] * 2


@pytest.mark.parametrize("text", ["6", "0h", "-1h", "6 h", "1.5h", "forever"])
def test_what_is_no_time_is_a_usage_error(changes: list[Mapping[str, str]], text: str) -> None:
    assert main(["topic", "retention", "orders", "--", text]) == 2
    assert changes == []


def test_update_changes_what_is_given_and_nothing_else(
    changes: list[Mapping[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topic", "update", "orders", "--write-queues", "5", "--permission", "rw"]) == 0
    assert changes == [{"group": group, "writeQueueNums": "5", "perm": "6"} for group in ("a", "b")]
    assert "orders in b: changed" in capsys.readouterr().err
    assert main(["topic", "update", "orders", "--permission", "r", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"broker": "a", "topic": "orders"},
        {"broker": "b", "topic": "orders"},
    ]


def test_update_of_an_attribute_counts_what_would_go(changes: list[Mapping[str, str]]) -> None:
    tokens = ["topic", "update", "orders", "--attribute", "retention.ms=1", "--broker", "b"]
    assert main(tokens) == 0
    assert changes == []
    assert main([*tokens, "--yes"]) == 0
    (change,) = changes
    assert (change["group"], change["attributes"]) == ("b", "+retention.ms=1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to change"),
        (["--queues", "0"], "a topic has at least 1 queue"),
        (["--permission", "x"], "--permission is r, w, rw or none"),
        (["--attribute", "a"], "--attribute a: expected name=value"),
        (
            ["--queues", "2", "--attribute", "retention=1"],
            "topics have the attributes message.type, retention.ms; nothing was changed;"
            " did you mean retention.ms?",
        ),
        (["--attribute", "cleanup.policy=COMPACTION"], "message.type, retention.ms; nothing was"),
    ],
)
def test_update_refuses_what_a_topic_cannot_have(
    options: list[str],
    said: str,
    changes: list[Mapping[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["topic", "update", "orders", *options]) == 2
    assert said in capsys.readouterr().err
    assert changes == []


def test_an_attribute_of_an_older_version_can_be_removed(changes: list[Mapping[str, str]]) -> None:
    assert main(["topic", "update", "orders", "--attribute", "cleanup.policy="]) == 0
    assert [change["attributes"] for change in changes] == 2 * ["-cleanup.policy"]


def test_update_of_a_group_without_the_topic_changes_nothing(
    changes: list[Mapping[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["topic", "update", "orders", "--queues", "2", "--broker", "a", "--broker", "z"]
    assert main(tokens) == 1
    assert "orders is not in z; nothing was changed" in capsys.readouterr().err
    assert changes == []
