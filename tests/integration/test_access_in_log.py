"""Accounts in the log of real processes: commands, followers, and a leader that is killed."""

import io
import json
from collections.abc import Iterator

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.access_bodies import UserInfo
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.signature import Credentials
from tests.harness.module_cluster import heal
from tests.harness.operator_cluster import OPERATOR, dledger, running_guarded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("access_in_log")]

ANSWER_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("in-log")
    with running_guarded(folder) as found:
        yield found


def sent(cluster: LocalCluster, name: str, secret: str) -> str:
    """Send a message in the name of an account; return why it is refused, empty if it is not."""

    async def send() -> str:
        config = ClientConfig(credentials=Credentials(name, secret))
        async with (
            connect([cluster.namesrv_address], config) as client,
            Producer(client, "p") as producer,
        ):
            try:
                await producer.send(Message("orders", b"x"))
            except ClientError as error:
                return str(error)
        return ""

    return trio.run(send)


async def asked_at(
    address: str, command: RemotingCommand, credentials: Credentials = OPERATOR
) -> RemotingCommand:
    """Ask one member in RocketMQ's form, as its tools do."""
    credentials.sign(command)
    host, _, port = address.rpartition(":")
    decoder = FrameDecoder()
    with trio.fail_after(ANSWER_WITHIN_S):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(encode_command(command))
            while True:
                for answer in decoder.feed(await stream.receive_some(65_536)):
                    if answer.is_response:
                        return answer


def refused(cluster: LocalCluster, name: str, secret: str) -> str:
    """Return why the leader takes no request in the name of an account; empty: it does."""

    async def ask() -> str:
        leader = cluster.brokers[await cluster.wait_healthy()]
        command = request(RequestCode.GET_BROKER_RUNTIME_INFO)
        answer = await asked_at(leader.address, command, Credentials(name, secret))
        return str(answer.remark) if answer.code else ""

    return trio.run(ask)


def test_commands_change_accounts_that_count(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dledger(cluster, "acl", "add", "order-service", "--cluster") == 0
    secret = capsys.readouterr().out.strip()
    assert len(secret) >= 32
    assert "No default permission for topic: orders" in sent(cluster, "order-service", secret)
    assert dledger(cluster, "acl", "grant", "order-service", "--cluster", "--topic=orders=PUB") == 0
    assert sent(cluster, "order-service", secret) == ""
    assert (
        dledger(cluster, "acl", "check", "order-service", "--cluster", "--topic=orders", "-p=PUB")
        == 0
    )
    assert (
        dledger(cluster, "acl", "check", "order-service", "--cluster", "--topic=orders", "-p=SUB")
        == 1
    )
    assert dledger(cluster, "acl", "disable", "order-service") == 0
    assert "Check signature failed" in refused(cluster, "order-service", secret)
    assert "Check signature failed" in sent(cluster, "order-service", secret), "the SDK names it"
    assert dledger(cluster, "acl", "enable", "order-service") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("another secret of it\n"))
    assert dledger(cluster, "acl", "secret", "order-service", "--secret-stdin") == 0
    assert "Check signature failed" in refused(cluster, "order-service", secret)
    assert sent(cluster, "order-service", "another secret of it") == ""
    capsys.readouterr()
    assert dledger(cluster, "acl", "ls", "--cluster", "--output", "json") == 0
    shown = capsys.readouterr().out
    (row,) = (row for row in json.loads(shown) if row["account"] == "order-service")
    assert (row["topics"], row["enabled"], row["admin"]) == ("orders=PUB", True, False)
    assert "another secret of it" not in shown
    assert dledger(cluster, "acl", "add", "operator", "--cluster") != 0
    assert "stands in the file" in capsys.readouterr().err
    for _ in range(2):
        code = dledger(cluster, "acl", "rm", "order-service", "--cluster")
    assert code != 0, "it is removed"
    assert "Check signature failed" in refused(cluster, "order-service", "another secret of it")


async def test_every_member_takes_a_change(cluster: LocalCluster) -> None:
    """As `mqadmin -c` sends it: to each of them, in any order."""
    user = UserInfo(username="by-any-member", password="a secret by any", user_type="Normal")
    ext = {"username": "by-any-member"}
    for node in cluster.brokers.values():
        made = await asked_at(
            node.address, request(RequestCode.AUTH_CREATE_USER, dict(ext), user.encode())
        )
        assert (made.code, made.remark) == (0, None), node.name
    user.password = "another secret"
    for node in cluster.brokers.values():
        other = await asked_at(
            node.address, request(RequestCode.AUTH_CREATE_USER, dict(ext), user.encode())
        )
        assert (other.code, other.ext["outcome"]) == (ResponseCode.NO_PERMISSION, "not_stored")
        assert "exists already" in str(other.remark)


def test_accounts_survive_a_killed_leader(cluster: LocalCluster) -> None:
    name = trio.run(cluster.wait_healthy)
    assert dledger(cluster, "acl", "add", "survivor", "--cluster", "--topic=orders=PUB|SUB") == 0

    async def shown_without_it() -> UserInfo:
        await cluster.kill(name)
        successor = cluster.brokers[await cluster.wait_leader(other_than=name)]
        ask = request(RequestCode.AUTH_GET_USER, {"username": "survivor"})
        return UserInfo.decode((await asked_at(successor.address, ask)).body)

    try:
        assert trio.run(shown_without_it).user_type == "Normal"
        assert dledger(cluster, "acl", "rm", "survivor", "--cluster") == 0
    finally:
        trio.run(heal, cluster)
