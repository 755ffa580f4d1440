"""Requests over a connection with a challenge: captured bytes are of no use anywhere else."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.accounts import SIGNED
from dledger.remoting.access.gate import AccessGate, guarded_table
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import ConnectFailedError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.signature import SIGNATURE, Credentials
from dledger.remoting.server import RemotingServer
from dledger.testing.doubles import ManualClock

READ_SETTINGS, DELETE_TOPIC, SEND = 351, 215, 10
CREDENTIALS = Credentials("operator", "0123456789")


class Guarded:
    """A server behind a gate; what reached its handlers, and the bytes that came in."""

    def __init__(self, network: Any, folder: Path) -> None:
        path = folder / "accounts.toml"
        path.write_text('[accounts.operator]\nsecret_key = "0123456789"\nadmin = true\n')
        store = AccountStore(OsDisk(), str(path))
        rules = dict.fromkeys((READ_SETTINGS, DELETE_TOPIC, SEND), SIGNED)
        self.table = guarded_table(AccessGate(store, rules, ManualClock(), Random(4)))
        self.done: list[RemotingCommand] = []
        for code in rules:
            self.table.register(code, self._do, Limiter(str(code), 10))
        self.server = RemotingServer(network, self.table)

    def _do(self, _: Connection, asked: RemotingCommand) -> RemotingCommand:
        self.done.append(asked)
        return response_to(asked)


@pytest.fixture
async def guarded(nursery: trio.Nursery, memory_network: Any, tmp_path: Path) -> Guarded:
    made = Guarded(memory_network, tmp_path)
    await nursery.start(made.server.serve, "b", 1)
    return made


@pytest.fixture
def client(nursery: trio.Nursery, memory_network: Any) -> RemotingClient:
    return RemotingClient(nursery, memory_network, credentials=CREDENTIALS)


async def answer_to(
    network: Any, command: RemotingCommand, *, with_challenge: bool = False
) -> RemotingCommand:
    """Send *command* as it is over a connection of its own; return the answer."""
    stream = await network.connect("b", 1, timeout_s=1)
    decoder, answers = FrameDecoder(), []
    if with_challenge:
        await stream.send_all(encode_command(request(RequestCode.SIGNATURE_CHALLENGE)))
        answers += decoder.feed(await stream.receive_some(65536))
    await stream.send_all(encode_command(command))
    wanted = len(answers) + 1
    while len(answers) < wanted:
        answers += decoder.feed(await stream.receive_some(65536))
    await stream.aclose()
    return answers[-1]


async def test_a_client_with_credentials_signs_for_its_connection(
    client: RemotingClient, guarded: Guarded
) -> None:
    for _ in range(3):
        assert (await client.invoke("b:1", request(READ_SETTINGS, {"topic": "T"}))).code == 0
    assert [asked.ext["SignatureSequence"] for asked in guarded.done] == ["1", "2", "3"]


@pytest.mark.parametrize("with_challenge", [False, True])
async def test_a_captured_request_is_refused_on_another_connection(
    client: RemotingClient, guarded: Guarded, memory_network: Any, with_challenge: bool
) -> None:
    await client.invoke("b:1", request(READ_SETTINGS, {"topic": "T"}))
    (captured,) = guarded.done
    captured.flag = 0
    for code in (READ_SETTINGS, DELETE_TOPIC):
        captured.code = code
        refused = await answer_to(memory_network, captured, with_challenge=with_challenge)
        assert "Check signature failed for accessKey=operator" in (refused.remark or "")
        assert refused.ext["outcome"] == "not_stored"
    assert len(guarded.done) == 1


async def test_a_captured_request_is_no_signature_of_rocketmqs_form(
    client: RemotingClient, guarded: Guarded, memory_network: Any
) -> None:
    """Not even when an attacker takes the fields of the fresh form away or moves their values."""
    await client.invoke("b:1", request(READ_SETTINGS, {"topic": "T"}))
    (captured,) = guarded.done
    values = [v for name, v in sorted(captured.ext.items()) if name not in ("AccessKey", SIGNATURE)]
    proof = {"AccessKey": "operator", SIGNATURE: captured.ext[SIGNATURE]}
    for ext in (proof, {**proof, "topic": "T"}, {**proof, "topic": "".join(values)}):
        refused = await answer_to(memory_network, request(DELETE_TOPIC, ext))
        assert "Check signature failed" in (refused.remark or "")
    assert len(guarded.done) == 1


async def test_rocketmqs_form_passes_still(guarded: Guarded, memory_network: Any) -> None:
    command = request(SEND, {"topic": "T"}, b"x")
    CREDENTIALS.sign(command)
    assert (await answer_to(memory_network, command)).code == 0


async def test_a_challenge_is_made_once_for_a_connection(
    guarded: Guarded, memory_network: Any
) -> None:
    stream = await memory_network.connect("b", 1, timeout_s=1)
    decoder, seen = FrameDecoder(), []
    for _ in range(2):
        await stream.send_all(encode_command(request(RequestCode.SIGNATURE_CHALLENGE)))
        seen += [
            answer.ext["challenge"] for answer in decoder.feed(await stream.receive_some(9999))
        ]
    other = await answer_to(memory_network, request(RequestCode.SIGNATURE_CHALLENGE))
    assert len(seen) == 2
    assert len(set(seen)) == 1
    assert other.ext["challenge"] != seen[0]


async def test_a_server_without_challenges_gets_rocketmqs_form(
    client: RemotingClient, nursery: trio.Nursery, memory_network: Any
) -> None:
    got: list[RemotingCommand] = []

    def take(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        got.append(asked)
        return response_to(asked)

    table = ProcessorTable()
    table.register(SEND, take, Limiter("test", 10))
    await nursery.start(RemotingServer(memory_network, table).serve, "r", 1)
    assert (await client.invoke("r:1", request(SEND, {"topic": "T"}))).code == 0
    assert set(got[0].ext) == {"topic", "AccessKey", SIGNATURE}


async def test_no_answer_about_signatures_means_nothing_was_sent(
    client: RemotingClient, nursery: trio.Nursery, memory_network: Any
) -> None:
    table = ProcessorTable()
    limiter = Limiter("test", 10)
    table.register(RequestCode.SIGNATURE_CHALLENGE, lambda _, asked: DEFERRED, limiter)
    await nursery.start(RemotingServer(memory_network, table).serve, "s", 1)
    with pytest.raises(ConnectFailedError, match="no connection to s:1") as raised:
        await client.invoke("s:1", request(SEND, {"topic": "T"}), timeout_s=30)
    assert raised.value.outcome == "not_stored"
    assert client.addresses == ()
