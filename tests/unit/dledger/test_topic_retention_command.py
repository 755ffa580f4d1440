"""``dledger topic retention`` and ``update``: what would go is shown, and goes with --yes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from dledger.cli.main import main
from dledger.client.core.errors import ConfirmationNeededError
from dledger.client.core.route import TopicRoute
from dledger.remoting.protocol.own_fields import GivenUp

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
