"""Rows about running it: settings, statistics, the second port, switches, the test kit."""

from collections.abc import AsyncIterator

import trio

from dledger.client.core.errors import NoNameServerError
from dledger.client.core.hooks import SendMessageContext
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.remoting.properties import format_properties, read_properties
from dledger.remoting.protocol.bodies import BrokerStatsData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.testing import assert_messages, drain
from tests.harness.cluster_questions import ask
from tests.harness.eventually import look_until
from tests.matrix.ground import LOOK_S, SEND_TIMEOUT_S, SWITCH, Ground, retried
from tests.matrix.row import Round, row

SETTING = "maxTransferCountOnMessageInMemory"
"""One that may be changed while a broker runs."""


async def _ask(
    address: str, code: int, ext: dict[str, str], body: bytes = b""
) -> RemotingCommand | None:
    """Return an answer that is a success; None: none came, or a refusal."""
    try:
        answer = await ask(address, code, ext, body, timeout_s=2.0)
    except NoNameServerError:
        return None
    return answer if answer.code == ResponseCode.SUCCESS else None


@row("fast port")
async def fast_port(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("old", 1)
    tail = await ground.tail("old")
    tried = 0

    async def play(number: int) -> None:
        nonlocal tried
        answer = None
        while answer is None:
            tried += 1
            body = b"by the fast port %d" % tried
            header = SendMessageHeader(
                producer_group="old-ones",
                topic="old",
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
            )
            port = ground.cluster.ports[await ground.leader()].client - 2
            fast = f"127.0.0.1:{port}"
            answer = await _ask(fast, RequestCode.SEND_MESSAGE, dict(header.encode()), body)
        there: dict[bytes, int] = {}
        while body not in there:
            there |= {m.body_bytes: m.queue_offset for m in await tail.more()}
            await trio.sleep(LOOK_S)
        assert answer.ext["queueOffset"] == str(there[body])
        if number == 0:
            # The broker that took it may be the leader that something happens to: it answers again.
            await look_until(
                lambda: ask(fast, RequestCode.PULL_MESSAGE, {"topic": "old"}),
                lambda pull: pull.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            )

    yield play


@row("runtime configuration")
async def runtime_configuration(ground: Ground) -> AsyncIterator[Round]:
    async def play(number: int) -> None:
        value = str(20 + number % 10)
        body = format_properties({SETTING: value}).encode()
        while True:
            address = ground.cluster.brokers[await ground.leader()].address
            if await _ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, body) is None:
                continue
            answer = await _ask(address, RequestCode.GET_BROKER_CONFIG, {})
            if answer is not None:
                break
        found = read_properties(bytes(answer.body).decode())[SETTING]
        # A broker that was killed in between begins with what its file holds.
        assert found in (value, "32"), found
        refused = {"storePathRootDir": "/elsewhere"}
        body = format_properties(refused).encode()
        assert await _ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, body) is None

    yield play


@row("hooks and statistics")
async def hooks_and_statistics(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("counted", 1)
    key = {"statsName": "TOPIC_PUT_NUMS", "statsKey": "counted"}
    hook = _Told()
    config = ProducerConfig(send_timeout_s=SEND_TIMEOUT_S, send_message_hooks=(hook,))
    async with Producer(ground.client, "counting", config) as producer:

        async def play(number: int) -> None:
            while True:
                leader = await ground.leader()
                address = ground.cluster.brokers[leader].address
                before = await _put(address, key)
                hook.before, hook.after = 0, []
                results = [
                    await producer.send(Message("counted", b"%d-%d" % (number, each)))
                    for each in range(3)
                ]
                assert (hook.before, hook.after) == (3, [r.message_id for r in results])
                after = await _put(address, key)
                # Only a broker that took all three counted them; after a fail-over it is another.
                if before is not None and after == before + 3:
                    return

        yield play


class _Told:
    """A hook that notes what it is given."""

    def __init__(self) -> None:
        self.before = 0
        self.after: list[str] = []

    def send_message_before(self, context: SendMessageContext) -> None:
        self.before += 1

    def send_message_after(self, context: SendMessageContext) -> None:
        assert isinstance(context.send_result, SendResult)
        self.after.append(context.send_result.message_id)


async def _put(address: str, key: dict[str, str]) -> int | None:
    """Return how many messages a broker has taken since it started; None: it does not say."""
    try:
        answer = await ask(address, RequestCode.VIEW_BROKER_STATS_DATA, key, timeout_s=2.0)
    except NoNameServerError:
        return None
    if answer.code != ResponseCode.SUCCESS:
        return 0  # nothing yet
    return BrokerStatsData.decode(answer.body).stats_day.sum


@row("announced")
async def announced(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("unwaited", 1)
    tail = await ground.tail("unwaited")

    async def play(number: int) -> None:
        # RocketMQ would answer this one before it is on disk anywhere else; here it is as any.
        body = b"unwaited %d" % number
        message = Message("unwaited", body, properties={"WAIT": "false"})
        await ground.producer.send(message)
        await tail.until([body])
        for name, node in ground.cluster.brokers.items():
            wanted = ground.starts[name]
            while node.log_path.read_text(errors="replace").count(SWITCH) < wanted:
                await trio.sleep(LOOK_S)

    yield play


@row("test kit")
async def test_kit(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("tested")
    sent: list[bytes] = []

    async def play(number: int) -> None:
        for each in range(3):
            body = b"tested %d-%d" % (number, each)
            await ground.producer.send(Message("tested", body))
            sent.append(body)
        while len(await retried(lambda: drain(ground.client, "tested"))) < len(sent):
            await trio.sleep(LOOK_S)
        await retried(lambda: assert_messages(ground.client, "tested", sent))

    yield play
