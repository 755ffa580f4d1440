"""A guarded cluster of real processes: accounts, TLS everywhere, peers that prove themselves."""

import os
import ssl
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from dledger.cli.acl_command import convert
from dledger.cli.local_cluster import LocalCluster, Node, lay_out
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientConfig
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.tcp import client_tls
from tests.harness.cluster_questions import ask, create_topic
from tests.harness.eventually import logged, look_until
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.operator_cluster import OPERATOR, SERVICE, plain_acl
from tests.harness.present import present

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("access")]

PLAIN_ACL = plain_acl("orders", "billing")


@dataclass
class Guarded:
    """A cluster with every access check on, and its credentials."""

    cluster: LocalCluster
    accounts: Path
    tls: ssl.SSLContext
    ca: trustme.CA
    files: dict[str, str]

    def config(self, credentials: Credentials | None) -> ClientConfig:
        return ClientConfig(credentials=credentials, tls=self.tls)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    files = {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    ca.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    (folder / "plain_acl.yml").write_text(PLAIN_ACL)
    accounts = folder / "accounts.toml"
    convert(folder / "plain_acl.yml", accounts)
    (folder / "group.secret").write_text("a secret of this group\n")
    (folder / "tools.yml").write_text(f"accessKey: operator\nsecretKey: {OPERATOR.secret_key}\n")
    tls = {
        "server.tls_mode": "enforcing",
        "server.tls_cert_file": files["cert"],
        "server.tls_key_file": files["key"],
    }
    acl = {"server.acl_enable": True, "server.acl_file": str(accounts)}
    cluster = lay_out(
        folder,
        settings={
            **SMALL_FILES,
            **tls,
            **acl,
            "client.tls_enable": True,
            "client.tls_ca_file": files["ca"],
            "client.credentials_file": str(folder / "tools.yml"),
            "raft.secret_file": str(folder / "group.secret"),
            "raft.tls_cert_file": files["cert"],
            "raft.tls_key_file": files["key"],
            "raft.tls_ca_file": files["ca"],
        },
    )
    path = present(cluster.namesrv.config_path)
    lines = "".join(
        f"{name.partition('.')[2]} = {str(value).lower() if value is True else repr(value)}\n"
        for name, value in {**tls, **acl}.items()
    ).replace("'", '"')
    path.write_text(path.read_text().replace("[server]\n", f"[server]\n{lines}"))
    environment = {
        "DLEDGER_CREDENTIALS": str(folder / "tools.yml"),
        "DLEDGER_TLS_CA_FILE": files["ca"],
    }

    os.environ.update(environment)
    try:
        with running(cluster):
            yield Guarded(cluster, accounts, client_tls(ca_file=files["ca"]), ca, files)
    finally:
        for name in environment:
            del os.environ[name]


async def test_an_account_does_what_its_lines_say_and_no_more(guarded: Guarded) -> None:
    names = [guarded.cluster.namesrv_address]
    for topic in ("orders", "others"):
        await create_topic(names, topic, queues=1)
    async with (
        connect(names, guarded.config(SERVICE)) as client,
        Producer(client, "p") as producer,
        PullConsumer(client, "billing") as consumer,
    ):
        sent = await producer.send(Message("orders", b"one"))
        assert sent.queue_offset == 0
        (queue,) = await consumer.fetch_message_queues("orders")
        pulled = await consumer.pull(queue, 0)
        assert [bytes(message.body) for message in pulled.messages] == [b"one"]
        with pytest.raises(ClientError, match="No default permission for topic: others") as raised:
            await producer.send(Message("others", b"two"))
        assert raised.value.outcome == "not_stored"
    async with (
        connect(names, guarded.config(SERVICE)) as client,
        PullConsumer(client, "shipping") as consumer,
    ):
        (queue,) = await consumer.fetch_message_queues("orders")
        with pytest.raises(ClientError, match="No default permission for group: shipping"):
            await consumer.pull(queue, 0)


async def test_a_plain_connection_is_refused(guarded: Guarded) -> None:
    for node in guarded.cluster.nodes:
        host, _, port = node.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(b"\0\0\0\x10\0\0\0\x0c{}")
            with trio.fail_after(60):
                try:
                    while await stream.receive_some(1000):
                        pass
                except trio.BrokenResourceError:
                    pass  # it hung up hard


async def test_a_change_of_the_account_file_counts_within_seconds(guarded: Guarded) -> None:
    names = [guarded.cluster.namesrv_address]
    await create_topic(names, "later", queues=1)
    before = guarded.accounts.read_text()
    try:
        async with (
            connect(names, guarded.config(SERVICE)) as client,
            Producer(client, "p") as producer,
        ):
            with pytest.raises(ClientError, match="No default permission"):
                await producer.send(Message("later", b"1"))
            put(guarded.accounts, before.replace('"orders" =', '"later" = "PUB", "orders" ='))

            async def send() -> SendResult | None:
                try:
                    return await producer.send(Message("later", b"2"))
                except ClientError as error:
                    if "No default permission" not in str(error):
                        raise
                    return None

            sent = present(await look_until(send, lambda result: result is not None))
            assert sent.queue_offset == 0
            put(guarded.accounts, "[[[ half a file")
            for node in guarded.cluster.nodes:
                await look_until(partial(kept_accounts, node), bool)
            assert (await producer.send(Message("later", b"3"))).queue_offset == 1
    finally:
        put(guarded.accounts, before)
    for node in guarded.cluster.nodes:
        log = node.log_path.read_text()
        for secret in (OPERATOR.secret_key, SERVICE.secret_key, "a secret of this group"):
            assert secret not in log


def put(path: Path, text: str) -> None:
    """Let a file have another content, in one step: a reader sees all or nothing of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def kept_accounts(node: Node) -> list[dict[str, Any]]:
    """Return when a node has reported that it does not use the account file."""
    return logged(node.log_path, "accounts_kept")


async def test_the_vip_channel_sends_and_does_not_pull(guarded: Guarded) -> None:
    leader = await guarded.cluster.wait_leader()
    host, _, port = guarded.cluster.brokers[leader].address.rpartition(":")
    fast = f"{host}:{int(port) - 2}"
    assert (await ask(fast, RequestCode.GET_BROKER_RUNTIME_INFO)).code == 0
    pull = await ask(fast, RequestCode.PULL_MESSAGE, {"topic": "orders"})
    assert (pull.code, pull.remark) == (3, " request type 11 not supported")
    saved = os.environ.pop("DLEDGER_CREDENTIALS")
    try:
        refused = await ask(fast, RequestCode.GET_BROKER_RUNTIME_INFO)
        assert "No accessKey is configured" in (refused.remark or "")
    finally:
        os.environ["DLEDGER_CREDENTIALS"] = saved


def listening(pid: int, tables: tuple[str, ...] = ("tcp", "tcp6")) -> set[str]:
    """Return the addresses that a process listens on, as the kernel has them."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now
            held.add(descriptor.readlink().name)
    lines = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in tables]
    sockets = [line.split() for table in lines for line in table]
    return {
        fields[1].partition(":")[0]
        for fields in sockets
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in held
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_beyond_loopback(guarded: Guarded) -> None:
    """NameServer, client ports, VIP channels and peer ports, as `dledger up` lays them out."""
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for node in guarded.cluster.nodes:
        assert node.pid is not None
        addresses = listening(node.pid)
        assert addresses
        assert addresses <= loopback, node.name


async def certificate_at(address: str, tls: ssl.SSLContext) -> bytes:
    """Return the certificate that is shown there, DER."""
    host, _, port = address.rpartition(":")
    stream = await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=tls)
    async with stream:
        await stream.do_handshake()
        shown = stream.getpeercert(binary_form=True)
    assert shown is not None
    return bytes(shown)


def peer_addresses(cluster: LocalCluster) -> list[str]:
    path = present(cluster.brokers["n0"].config_path)
    peers = tomllib.loads(path.read_text())["raft"]["peers"]
    return [peer.partition("-")[2] for peer in peers.split(";")]


async def test_renewed_certificates_are_shown_without_a_restart(guarded: Guarded) -> None:
    cluster, files = guarded.cluster, guarded.files
    renewed = guarded.ca.issue_cert("127.0.0.1")
    pem = renewed.cert_chain_pems[0].bytes()
    before = {node.name: node.pid for node in cluster.nodes}
    renewed.cert_chain_pems[0].write_to_path(files["cert"])
    renewed.private_key_pem.write_to_path(files["key"])
    mutual = client_tls(ca_file=files["ca"], cert_file=files["cert"], key_file=files["key"])
    wanted = ssl.PEM_cert_to_DER_cert(pem.decode())
    ports = [(node.address, guarded.tls) for node in cluster.nodes]
    ports += [(address, mutual) for address in peer_addresses(cluster)]
    for address, tls in ports:
        await look_until(partial(certificate_at, address, tls), lambda shown: shown == wanted)
    assert {node.name: node.pid for node in cluster.nodes} == before
    await cluster.wait_healthy()
