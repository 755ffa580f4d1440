"""Clients of the gRPC protocol through `dledger-proxy`: what they send, what must come of it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trustme

from dledger.cli.local_cluster import LocalCluster, Node, local_cluster
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.core.message_ext import MessageExt
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import ForeignClient, Line
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import messages_at

NORMAL, FIFO, DELAY, TRANSACTION = 1, 2, 3, 4
MANY = 10_000
LOOK_S = 0.1
SEND_S = 300.0
CONSUME_S = 120.0

Started = Callable[..., AbstractAsyncContextManager[ForeignClient]]
"""Starts a client: its folder, its part, endpoints, and the part's own arguments."""


def bodies(lines: list[Line]) -> set[str]:
    """Return the bodies of messages among lines."""
    return {line["body"] for line in lines if "body" in line}


@asynccontextmanager
async def cluster_with_proxies(
    folder: Path, count: int = 1, *, queues: int = 4
) -> AsyncIterator[LocalCluster]:
    """Run three brokers, and proxies before them; there is a topic ``Orders``."""
    async with local_cluster(
        folder / "cluster", settings=SMALL_FILES, proxies=free_ports(count)
    ) as cluster:
        await create_topic([cluster.namesrv_address], "Orders", queues=queues)
        yield cluster


@asynccontextmanager
async def cluster_with_tls(folder: Path, accounts: str = "") -> AsyncIterator[LocalCluster]:
    """Run brokers, and a proxy ``tls0`` that speaks TLS.

    Args:
        accounts: TOML; every call must be signed by one of them. Empty: none is checked.
    """
    server = trustme.CA().issue_cert("127.0.0.1")
    key, chain = folder / "key.pem", folder / "chain.pem"
    server.private_key_pem.write_to_path(key)
    for part in server.cert_chain_pems:
        part.write_to_path(chain, append=True)
    config = folder / "proxy.toml"
    settings = f"[server]\ntls_cert_file = '{chain}'\ntls_key_file = '{key}'\n"
    if accounts:
        acl_file = folder / "accounts.toml"
        acl_file.write_text(accounts)
        settings += f"acl_enable = true\nacl_file = '{acl_file}'\n"
    config.write_text(settings)
    async with cluster_with_proxies(folder, 0) as cluster:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        options = ("-c", str(config), "--namesrv", cluster.namesrv_address, "--listen", address)
        log = cluster.folder / "tls0.log"
        cluster.proxies["tls0"] = Node("tls0", address, ("proxy", *options), log)
        await cluster.start("tls0")
        await cluster.wait_proxies()
        yield cluster


async def create_group(namesrv: str, topic: str, config: SubscriptionGroupConfig) -> None:
    """Create a consumer group at the brokers of *topic*."""
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    async with connect([namesrv]) as sdk:
        for name in (await sdk.route(topic)).broker_names():
            answer = await sdk.ask_leader(name, code, {}, config.encode(), topic=topic)
            assert answer.code == ResponseCode.SUCCESS, answer.remark


async def answered(producer: ForeignClient, body: str, **asked: Any) -> Line:
    """Send one message and return where it is stored."""
    answer = await producer.ask({"topic": "Orders", "body": body, **asked})
    assert "error" not in answer, answer
    return answer


async def send_all_kinds(
    producer: ForeignClient, *, recalls: bool = True, asked_back: bool = True
) -> dict[str, Line]:
    """Send messages of each kind, and return their answers by body."""
    sent: dict[str, Line] = {}
    for number in range(30):
        body = f"m{number}"
        sent[body] = await answered(
            producer,
            body,
            tags="ABC"[number % 3],
            keys=f"k{number}",
            properties={"origin": f"row {number}"},
        )
    sent["größer " * 1000] = await answered(producer, "größer " * 1000, tags="A", keys="k")
    sent["again"] = await answered(producer, "again", tags="A", keys="k")
    for number in range(10):
        sent[f"f{number}"] = await answered(producer, f"f{number}", group="one", tags="A")
    sent["later"] = await answered(producer, "later", tags="A", deliver_in_s=4)
    for end in ("commit", "rollback", "leave")[: 3 if asked_back else 2]:
        sent[end] = await answered(producer, end, tags="A", transaction=end)
    if recalls:
        recalled = await answered(producer, "recalled", tags="A", deliver_in_s=60, recall=True)
        assert recalled["recalled"] == recalled["message_id"]
    return sent


def judge_consumed(consumer: ForeignClient, sent: dict[str, Line], wanted: set[str]) -> None:
    """Assert that each message came as it was sent, once, and the refused one twice."""
    counts = Counter(line["body"] for line in consumer.messages)
    assert counts == {body: 1 + (body == "again") for body in wanted}
    types = {"later": DELAY, "commit": TRANSACTION, "leave": TRANSACTION}
    for line in consumer.messages:
        body = line["body"]
        assert line["message_id"] == sent[body]["message_id"]
        assert not line["corrupted"]
        kind = FIFO if body.startswith("f") else types.get(body, NORMAL)
        assert line.get("type", kind) == kind
        assert line["group"] == ("one" if kind == FIFO else None)
        if body.startswith("m"):
            number = int(body[1:])
            assert (line["tags"], line["keys"]) == ("ABC"[number % 3], [f"k{number}"])
            assert line["properties"] == {"origin": f"row {number}"}
    attempts = [line["attempt"] for line in consumer.messages if line["body"] == "again"]
    assert attempts == [1, 2]


async def exchange_every_kind(
    folder: Path,
    client: Started,
    endpoints: str,
    parts: Sequence[str],
    *,
    recalls: bool = True,
    asked_back: bool = True,
) -> None:
    """Send each kind of message, and assert what consumers of *parts* get.

    Args:
        recalls: The client takes messages back.
        asked_back: Producers of the topic are asked about transactions.
    """
    async with client(folder / "producer", "produce", endpoints, "Orders") as producer:
        sent = await send_all_kinds(producer, recalls=recalls, asked_back=asked_back)
        everything = set(sent) - {"rollback"}
        of_tags = everything - {f"m{number}" for number in range(2, 30, 3)}
        for part in parts:
            expression, wanted = ("A || B", of_tags) if part == "receive" else ("*", everything)
            async with client(
                folder / part, part, endpoints, f"group-{part}", "Orders", expression
            ) as consumer:
                try:
                    await consumer.until(partial(has_all, wanted), CONSUME_S)
                except AssertionError as error:
                    error.add_note(f"missing: {sorted(wanted - bodies(consumer.lines))}")
                    raise
            judge_consumed(consumer, sent, wanted)
        if asked_back:
            checked = {"checked": "leave", "message_id": sent["leave"]["message_id"]}
            assert checked in producer.lines


async def end_transactions(folder: Path, client: Started, endpoints: str, topic: str) -> None:
    """Commit a message, roll one back, leave one undecided; assert what a consumer gets."""
    async with client(folder / "deciding", "produce", endpoints, topic) as producer:
        sent = {
            end: await answered(producer, end, topic=topic, tags="A", transaction=end)
            for end in ("commit", "rollback", "leave")
        }
        async with client(
            folder / "paid", "receive", endpoints, "group-paid", topic, "*"
        ) as consumer:
            await consumer.until(lambda lines: bodies(lines) >= {"commit", "leave"}, CONSUME_S)
        checked = {"checked": "leave", "message_id": sent["leave"]["message_id"]}
        assert checked in producer.lines
    assert Counter(line["body"] for line in consumer.messages) == {"commit": 1, "leave": 1}
    for line in consumer.messages:
        assert line["message_id"] == sent[line["body"]]["message_id"]
        assert line.get("type", TRANSACTION) == TRANSACTION


def has_all(wanted: set[str], lines: list[Line]) -> bool:
    """Return whether all *wanted* bodies are there, and the refused one twice."""
    return wanted <= bodies(lines) and sum(line.get("body") == "again" for line in lines) >= 2


async def exchange_in_order(folder: Path, client: Started, cluster: LocalCluster) -> None:
    """Send messages of five message groups; assert that two push consumers get each in order."""
    endpoints = cluster.proxies["proxy0"].address
    config = SubscriptionGroupConfig("lined", consume_message_orderly=True)
    await create_group(cluster.namesrv_address, "Orders", config)
    async with (
        client(folder / "producer", "produce", endpoints, "Orders") as producer,
        client(folder / "one", "push", endpoints, "lined", "Orders", "*") as one,
        client(folder / "two", "push", endpoints, "lined", "Orders", "*") as two,
    ):
        for number in range(60):
            await answered(producer, f"{number % 5}-{number:03d}", group=f"g{number % 5}")
        with trio.fail_after(CONSUME_S):
            while len(bodies(one.lines) | bodies(two.lines)) < 60:
                await trio.sleep(LOOK_S)
    lines = sorted([*one.messages, *two.messages], key=lambda line: line["received_ms"])
    for group in range(5):
        mine = [line["body"] for line in lines if line["group"] == f"g{group}"]
        assert mine == [f"{group}-{number:03d}" for number in range(group, 60, 5)]


def settled_twice(lines: Sequence[Line], copies: Counter[str]) -> list[str]:
    """Return the ids that were acknowledged more often than such messages are stored.

    A client that gets no answer sends again under the same id: that is another message.
    """
    settled = Counter(line["settled"] for line in lines if "settled" in line)
    return [name for name, count in settled.items() if count > copies[name]]


async def lose_nothing(
    folder: Path,
    client: Started,
    cluster: LocalCluster,
    endpoints: str,
    parts: Sequence[str],
    first: str = "",
    *,
    again: bool = False,
    late: str = "",
) -> None:
    """Send and consume `MANY` messages while the leader dies, and then proxy *first*.

    Args:
        first: Empty: no proxy dies.
        again: The proxy is started again at its address: the client knows no other.
        late: Proxy that runs only when the clients have connected to *first*: they choose among
            addresses at random.
    """
    if late:
        await cluster.kill(late)
    consumers: list[ForeignClient] = []
    async with client(folder / "producer", "produce", endpoints, "Orders") as producer:

        def acknowledged() -> dict[str, Line]:
            return {line["acknowledged"]: line for line in producer.lines if "acknowledged" in line}

        async def consume(part: str, task_status: trio.TaskStatus[None]) -> None:
            async with client(
                folder / part, part, endpoints, f"group-{part}", "Orders", "*"
            ) as consumer:
                consumers.append(consumer)
                task_status.started()
                await is_sent.wait()
                await consumer.until(
                    lambda lines: acknowledged().keys() <= bodies(lines), CONSUME_S
                )

        is_sent = trio.Event()
        async with trio.open_nursery() as nursery:
            for part in parts:
                await nursery.start(consume, part)
            await producer.tell({"topic": "Orders", "many": MANY})
            with trio.fail_after(SEND_S):
                while len(acknowledged()) < MANY // 3:
                    await trio.sleep(LOOK_S)
                await cluster.kill(await cluster.wait_leader())
                if late:
                    await cluster.start(late)
                while len(acknowledged()) < 2 * MANY // 3:
                    await trio.sleep(LOOK_S)
                if first:
                    await cluster.kill(first)
                if again:
                    await cluster.start(first)
                while {"done": MANY} not in producer.lines:
                    await trio.sleep(LOOK_S)
            is_sent.set()
    stored = await messages_at(cluster.namesrv_address, "Orders")
    judge_nothing_lost(producer.lines, acknowledged(), stored, consumers)


def judge_nothing_lost(
    reported: list[Line],
    acknowledged: dict[str, Line],
    stored: Sequence[MessageExt],
    consumers: Sequence[ForeignClient],
) -> None:
    """Assert that each acknowledged message is stored as it was sent, and came to each consumer."""
    by_id = {message.message_id: message for message in stored}
    for body, answer in acknowledged.items():
        message = by_id[answer["message_id"]]
        assert (message.body.decode(), message.tags, message.keys) == (body, "F", body)
    assert len(acknowledged) >= MANY
    copies = Counter(message.message_id for message in stored)
    sent = acknowledged.keys() | {line["failed"] for line in reported if "failed" in line}
    for consumer in consumers:
        assert acknowledged.keys() <= bodies(consumer.lines) <= sent
        assert settled_twice(consumer.lines, copies) == []
        counts = Counter(line["body"] for line in consumer.messages)
        print(f"{consumer.name}: {sum(counts.values()) - len(counts)} received more than once")
    print(f"{len(acknowledged)} acknowledged, {len(sent) - len(acknowledged)} failed")
