"""The compose file in `deploy/`, played from nothing."""

import json
from pathlib import Path

import pytest

from tests.harness import compose_player
from tests.harness.compose_player import ComposePlayer, played

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compose_player.why_not() is not None, reason=str(compose_player.why_not())),
]

NAMESRV = "namesrv0:9876;namesrv1:9876;namesrv2:9876"

ASK_PROXY = """
import grpc
from dledger.proxy import messaging_pb2 as pb
with grpc.insecure_channel("proxy:8081") as channel:
    answer = channel.unary_unary(
        "/apache.rocketmq.v2.MessagingService/QueryRoute",
        request_serializer=pb.QueryRouteRequest.SerializeToString,
        response_deserializer=pb.QueryRouteResponse.FromString,
    )(
        pb.QueryRouteRequest(topic=pb.Resource(name="orders")),
        metadata=(("x-mq-client-id", "c"),), timeout=30,
    )
address, = answer.message_queues[0].broker.endpoints.addresses
print(answer.status.code, len(answer.message_queues), address.host, address.port)
"""

ASK_CONSOLE = """
from urllib.request import urlopen
print("broker-a" in urlopen("http://127.0.0.1:8180/cluster", timeout=30).read().decode())
"""


def run(player: ComposePlayer, name: str, *command: str) -> str:
    """Return what a program in a service prints; it must succeed."""
    done = player.run_in(name, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_compose_file_starts_a_cluster_from_nothing(tmp_path: Path) -> None:
    with played(tmp_path) as player:
        assert player.start("secret").wait(60) == 0, player.log("secret")
        daemons = [name for name in player.services if name != "secret"]
        for name in daemons:
            player.start(name)
        run(player, "n0", "dledger", "cluster", "health", "--wait", "--namesrv", NAMESRV)
        for name in daemons:
            while (checked := player.health(name)).returncode:
                assert player.processes[name].poll() is None, checked.stderr + player.log(name)
        run(player, "n1", "dledger", "topic", "create", "orders", "--namesrv", NAMESRV)
        sending = ("dledger", "send", "--topic", "orders", "--namesrv", NAMESRV, "-o", "json")
        (sent,) = json.loads(run(player, "n2", *sending, "first"))
        assert (sent["status"], sent["offset"]) == ("SEND_OK", 0)
        assert run(player, "proxy", "python", "-c", ASK_PROXY) == "20000 4 proxy 8081\n"
        assert run(player, "console", "python", "-c", ASK_CONSOLE) == "True\n"
        written = player.run_in("n0", "sh", "-c", "echo > /etc/x || echo > /var/lib/secret/peers")
        assert written.stderr.count("Read-only file system") == 2
        assert player.stop() == dict.fromkeys(player.services, 0)
