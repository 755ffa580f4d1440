"""Tables of `dledger` on a terminal of 80 columns, against a real broker and a written log."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.client.blocking import BlockingClient
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.core.message import Message
from dledger.testing.embedded_broker import EmbeddedBroker
from tests.harness.eventually import WITHIN_S
from tests.unit.dledger.test_log_verify import write_store

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("table-width")]

CHARS = 80
QUEUES = 2
TOPIC, GROUP, KEY = "customer-orders", "billing-service", "order-2026-000017"
BODY = "a body that is longer than what is left of a line beside the id of its message " * 4

TABLES = [
    "cluster ls",
    "raft status",
    "topic ls",
    f"topic route {TOPIC}",
    f"topic info {TOPIC}",
    "group ls",
    f"group info {GROUP}",
    f"group reset {GROUP} {TOPIC} --to-first",
    "producer ls",
    "stats",
    f"msg by-key {TOPIC} {KEY}",
    f"msg by-time {TOPIC}",
    f"msg by-offset {TOPIC} 0 0",
    f"send --topic {TOPIC} one two",
    "config get brokerName fileReservedTime",
    "dlq ls",
    "context ls",
    "log inspect FOLDER",
    "log verify FOLDER",
    "raft history FOLDER",
]
RECORDS = ["cluster ls --wide", "raft status --wide", "log inspect FOLDER --wide"]
"""More columns than fit a terminal: each row stands as a record."""


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(topics={TOPIC: QUEUES}) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def clients(broker: EmbeddedBroker) -> Iterator[None]:
    """Keep a producer that sent and a consumer that got it connected."""
    got = threading.Event()

    def listen(_messages: Sequence[DeliveredMessage], _context: ConsumeContext) -> None:
        got.set()

    config = PushConfig(consume_from=FROM_FIRST, persist_period_s=0.2)
    with BlockingClient(broker.name_server_addr) as client:
        producer = client.producer("order-service")
        message = Message(TOPIC, BODY.encode(), tags="placed", keys=KEY)
        # One to each queue: they take turns, and which one begins is drawn.
        sent = [producer.send(message) for _ in range(QUEUES)]
        assert {result.message_queue.queue_id for result in sent} == set(range(QUEUES))
        with client.push_consumer(GROUP, listen, {TOPIC: "*"}, config):
            assert got.wait(WITHIN_S)
            yield


@pytest.fixture(autouse=True)
def terminal(
    no_logs: None, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let commands print as on a terminal of 80 columns, and find the broker."""
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    monkeypatch.setenv("COLUMNS", str(CHARS))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NAMESRV_ADDR", broker.name_server_addr)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def printed(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must succeed and return what it prints."""
    folder = tmp_path / "n0"
    if "FOLDER" in command:
        write_store(folder)
    capsys.readouterr()
    status = main([str(folder) if word == "FOLDER" else word for word in command.split()])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    return shown.out


@pytest.mark.parametrize("command", TABLES)
def test_a_table_fits_into_80_columns(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(command, tmp_path, capsys)
    assert "┏" in out or not out, "a table with a head"
    assert max(map(len, out.splitlines()), default=0) <= CHARS


@pytest.mark.parametrize("command", RECORDS)
def test_wide_rows_are_records_in_80_columns(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(command, tmp_path, capsys)
    assert "┏" not in out, "no head: each line names its column"
    assert max(map(len, out.splitlines())) <= CHARS
    assert "term" in out
