"""``dledger topic delete``: the brokers first, then each NameServer."""

from __future__ import annotations

import pytest

from dledger.cli import ask_cluster
from dledger.cli.ask_cluster import NoAnswerError
from dledger.cli.main import main
from dledger.remoting.protocol.bodies import BrokerData, TopicRouteData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to


def test_a_topic_is_deleted_at_each_name_server_that_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    async def topic_route(*_: object, **__: object) -> TopicRouteData:
        return TopicRouteData()

    async def groups_of(*_: object) -> list[BrokerData]:
        return [BrokerData("c", "a", {0: "a:1"})]

    async def ask_leader(group: BrokerData, code: int, _: object) -> RemotingCommand:
        asked.append((group.broker_name, code))
        return response_to(request(code))

    async def ask_namesrvs(namesrvs: list[str], code: int, _: object) -> RemotingCommand:
        (address,) = namesrvs
        if address == "y:1":
            raise NoAnswerError(address, "refused")
        asked.append((address, code))
        return response_to(request(code))

    for double in (topic_route, groups_of, ask_leader, ask_namesrvs):
        monkeypatch.setattr(ask_cluster, double.__name__, double)
    tokens = ["topic", "delete", "orders", "--yes", "-n"]
    assert main([*tokens, "x:1;y:1;z:1"]) == 3
    assert asked == [
        ("a", RequestCode.DELETE_TOPIC_IN_BROKER),
        ("x:1", RequestCode.DELETE_TOPIC_IN_NAMESRV),
        ("z:1", RequestCode.DELETE_TOPIC_IN_NAMESRV),
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: orders is deleted in every broker group, and may still be listed"
    )
    assert "y:1" in line
    assert main([*tokens, "x:1;z:1"]) == 0
    assert capsys.readouterr().err == "orders is deleted\n"
