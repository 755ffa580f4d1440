"""`dledger group`, `producer`, `topic perm`, `stats` and `debug bundle` against a real broker."""

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.main import main
from dledger.client.blocking import BlockingClient
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.core.errors import ConfirmationNeededError
from dledger.client.core.message import Message
from dledger.testing.embedded_broker import EmbeddedBroker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("group-commands"),
    pytest.mark.usefixtures("no_logs"),
]

WITHIN_S = 60.0


class Heard:
    """A listener in worker threads that remembers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._more = threading.Condition()

    def __call__(self, messages: Sequence[DeliveredMessage], _context: ConsumeContext) -> None:
        with self._more:
            self.bodies += [message.body_bytes for message in messages]
            self._more.notify_all()

    def wait_for(self, count: int) -> list[bytes]:
        """Wait until *count* messages were received and return them."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.bodies) >= count, WITHIN_S), self.bodies
            return list(self.bodies)


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(topics={"orders": 2}) as running:
        yield running


class Shell:
    """Runs commands and reads what they print."""

    def __init__(self, namesrv: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._namesrv = namesrv
        self._capsys = capsys

    def run(self, *tokens: str, status: int = 0) -> tuple[str, str]:
        """Run a command that ends with *status*; return what it printed, results and notes."""
        self._capsys.readouterr()
        code = main([*tokens, "--namesrv", self._namesrv])
        out, err = self._capsys.readouterr()
        assert code == status, err
        return out, err

    def json(self, *tokens: str, status: int = 0) -> Any:
        """Run a command and return its JSON."""
        return json.loads(self.run(*tokens, "-o", "json", status=status)[0])

    def until(self, good: Callable[[Any], bool], *tokens: str) -> Any:
        """Run a command again until its JSON is *good*."""
        end = time.monotonic() + WITHIN_S
        while not good(found := self.json(*tokens)):
            assert time.monotonic() < end, found
            time.sleep(0.2)
        return found


@pytest.fixture
def shell(broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(broker.name_server_addr, capsys)


def offsets(found: Any) -> list[int]:
    """Return how far a group is in orders, as `group info` shows it."""
    return [row["consumed"] for row in found["queues"] if row["topic"] == "orders"]


def test_a_group_is_reset_while_it_runs_and_while_it_does_not(
    broker: EmbeddedBroker, shell: Shell, tmp_path: Path
) -> None:
    heard = Heard()
    config = PushConfig(consume_from=FROM_FIRST, persist_period_s=0.2)
    with BlockingClient(broker.name_server_addr) as client:
        producer = client.producer("billing-p")
        for number in range(10):
            producer.send(Message("orders", b"%d" % number, tags="a"))
        with client.push_consumer("billing", heard, {"orders": "a || b"}, config):
            heard.wait_for(10)
            # Its queues come to a member one topic after the other.
            found = shell.until(
                lambda f: sum(offsets(f)) == 10 and all(row["member"] for row in f["queues"]),
                *("group", "info", "billing"),
            )
            assert found["lag"] == 0
            (member,) = found["members"]
            assert {row["member"] for row in found["queues"]} == {member["client_id"]}
            assert {s["topic"]: s["expression"] for s in found["subscriptions"]} == {
                "%RETRY%billing": "*",
                "orders": "a || b",
            }
            planned = shell.json("group", "reset", "billing", "orders", "--to-first")
            assert not planned["changed"]
            assert [row["after"] for row in planned["queues"]] == [0, 0]
            assert sum(row["before"] for row in planned["queues"]) == 10
            assert len(heard.bodies) == 10

            done = shell.json("group", "reset", "billing", "orders", "--to-first", "--yes")
            assert {row["done"] for row in done["queues"]} == {"notified"}
            assert sorted(heard.wait_for(20)[10:]) == sorted(heard.bodies[:10])
            shell.until(lambda f: sum(offsets(f)) == 10, "group", "info", "billing")

            (row,) = [r for r in shell.json("group", "ls") if r["group"] == "billing"]
            assert row == {
                "group": "billing",
                "members": 1,
                "model": "CLUSTERING",
                "topics": 1,
                "lag": 0,
            }
            (row,) = shell.json("producer", "ls", "billing-p")
            assert row["client_id"] == member["client_id"]
            assert "no producer of absent" in shell.run("producer", "ls", "absent", status=1)[1]
            for number in range(10, 15):
                producer.send(Message("orders", b"%d" % number, tags="b"))
            heard.wait_for(25)
            shell.until(lambda f: sum(offsets(f)) == 15, "group", "info", "billing")
            (row,) = shell.json("stats", "orders")
            assert (row["topic"], row["group"], row["lag"]) == ("orders", "billing", 0)
            assert row["in_24h"] == 15
            assert row["out_24h"] >= 25
            twice, _ = shell.run("stats", "--watch", "--looks", "2", "--every-s", "0.1")
            assert twice.count("billing") == 2
            assert (
                "billing has 1 consumers running"
                in shell.run("group", "clone", "billing", "billing", "--yes", status=1)[1]
            )

        done = shell.json("group", "reset", "billing", "orders", "--to-time", "0", "--yes")
        assert {row["done"] for row in done["queues"]} == {"stored"}
        assert offsets(shell.json("group", "info", "billing")) == [0, 0]
        planned = shell.json("group", "reset", "billing", "orders", "--to-offset", "3", "--dry-run")
        assert [row["after"] for row in planned["queues"]] == [3, 3]
        assert offsets(shell.json("group", "info", "billing")) == [0, 0]
        err = shell.run("group", "reset", "billing", "orders", "--to-offset", "3", "--yes")[1]
        assert err == "2 queues: no consumer is connected; the offsets are stored\n"
        err = shell.run("group", "reset", "billing", "order", "--to-first", status=1)[1]
        assert err == "error: there is no topic order; nothing was changed; did you mean orders?\n"
        assert offsets(shell.json("group", "info", "billing")) == [3, 3]
        out, err = shell.run("group", "skip", "billing", "orders")
        assert "moves by" in out
        assert "--yes does it" in err
        shell.run("group", "skip", "billing", "orders", "--yes")
        assert sum(offsets(shell.json("group", "info", "billing"))) == 15
        shell.run("group", "clone", "billing", "audit", "--yes")
        assert sum(offsets(shell.json("group", "info", "audit"))) == 15


def has_stored(offset: int) -> Callable[[Any], bool]:
    """Return whether a group has stored that offset in a topic of one queue."""
    return lambda found: offset in [row["consumed"] for row in found["queues"]]


def test_a_paused_group_gets_nothing_until_it_is_resumed(
    broker: EmbeddedBroker, shell: Shell
) -> None:
    broker.create_topic("pausable", queue_nums=1)
    heard, other = Heard(), Heard()
    config = PushConfig(consume_from=FROM_FIRST, persist_period_s=0.2)
    topic = {"pausable": "*"}
    with BlockingClient(broker.name_server_addr) as client:
        producer = client.producer("pausable-p")
        with (
            client.push_consumer("sleeper", heard, topic, config),
            client.push_consumer("wakeful", other, topic, config),
        ):
            producer.send(Message("pausable", b"before"))
            heard.wait_for(1)
            before = shell.until(has_stored(1), "group", "info", "sleeper")
            assert before["consume_enable"]
            paused = shell.json("group", "pause", "sleeper")
            assert paused == {"group": "sleeper", "consume_enable": False, "changed": ["broker-a"]}
            assert "it was so before" in shell.run("group", "pause", "sleeper")[1]
            assert (
                "paused, see dledger group resume sleeper"
                in shell.run("group", "info", "sleeper")[1]
            )
            producer.send(Message("pausable", b"while paused"))
            other.wait_for(2)
            shell.until(has_stored(2), "group", "info", "wakeful")
            found = shell.json("group", "info", "sleeper")
            assert (found["lag"], len(found["members"])) == (1, 1), "connected, and behind"
            assert heard.bodies == [b"before"]
            assert "gets messages again" in shell.run("group", "resume", "sleeper")[1]
            assert heard.wait_for(2) == [b"before", b"while paused"]
    assert "no broker knows group slepper" in shell.run("group", "pause", "slepper", status=1)[1]


def test_a_group_that_no_broker_knows_is_not_reset(shell: Shell) -> None:
    for tokens in (("reset", "biling", "orders", "--to-first"), ("skip", "biling", "orders")):
        out, err = shell.run("group", *tokens, status=1)
        assert out == ""
        assert "no broker knows group biling; see dledger group ls" in err
    assert "biling" not in {row["group"] for row in shell.json("group", "ls")}


def test_a_topic_with_messages_is_deleted_when_that_is_confirmed(
    broker: EmbeddedBroker, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("doomed", queue_nums=2)
    assert "doomed is deleted" in shell.run("topic", "delete", "doomed")[1], "nothing is lost"
    broker.create_topic("doomed", queue_nums=2)
    shell.run("send", "-t", "doomed", "a", "b", "c")
    err = shell.run("topic", "delete", "doomed", status=1)[1]
    assert "doomed holds 3 messages, which would be removed; nothing was deleted" in err
    assert "--yes deletes it with them" in err
    for answer, status in (("\n", 1), ("no\n", 1), ("y\n", 0)):
        assert shell.json("topic", "info", "doomed")["messages"] == 3
        monkeypatch.setattr("sys.stdin", Person(answer))
        assert "Delete it? [y/N]" in shell.run("topic", "delete", "doomed", status=status)[1]
        monkeypatch.undo()
    shell.run("topic", "info", "doomed", status=1)
    broker.create_topic("doomed", queue_nums=2)
    shell.run("send", "-t", "doomed", "a")
    shell.run("topic", "delete", "doomed", "--yes")
    shell.run("topic", "info", "doomed", status=1)


class Person(io.StringIO):
    """Standard input of a terminal on which a user types."""

    def isatty(self) -> bool:
        return True


def test_what_is_sent_has_its_tag_keys_and_properties(broker: EmbeddedBroker, shell: Shell) -> None:
    broker.create_topic("with-headers", queue_nums=1)
    headers = ("--tag", "new", "--key", "o-1 c-7", "--property", "region=EU", "--property", "n=a=b")
    (sent,) = shell.json("send", "-t", "with-headers", *headers, "body")
    row = json.loads(shell.run("consume", "-t", "with-headers", "-o", "json")[0])
    assert (row["tags"], row["keys"], row["body"]) == ("new", "o-1 c-7", "body")
    assert {name: row["properties"][name] for name in ("region", "n")} == {
        "region": "EU",
        "n": "a=b",
    }
    assert sent["message_id"] == row["message_id"]
    err = shell.run("send", "-t", "with-headers", "--property", "region", "x", status=2)[1]
    assert "--property region: expected name=value" in err


def is_routed(permission: str) -> Callable[[Any], bool]:
    """Return whether a route shows it; a broker has it before a NameServer."""
    return lambda rows: [row["permission"] for row in rows] == [permission]


def test_read_only_topic_takes_no_message(broker: EmbeddedBroker, shell: Shell) -> None:
    broker.create_topic("closing", queue_nums=3)
    assert shell.json("topic", "perm", "closing", "r")["permission"] == "r"
    (row,) = shell.until(is_routed("R--"), "topic", "route", "closing")
    assert row["write_queues"] == 3
    shell.run("send", "-t", "closing", "x", status=1)
    shell.run("topic", "perm", "closing", "rw")
    shell.until(is_routed("RW-"), "topic", "route", "closing")
    shell.run("send", "-t", "closing", "x")
    assert "r, w, rw or none" in shell.run("topic", "perm", "closing", "rwx", status=2)[1]
    assert "no route" in shell.run("topic", "perm", "nowhere", "r", status=1)[1]


def test_create_shrinks_no_topic_and_update_asks(broker: EmbeddedBroker, shell: Shell) -> None:
    shell.run("topic", "create", "grown", "--queues", "4", "--type", "NORMAL")
    for number in range(8):
        shell.run("send", "-t", "grown", "--queue", str(number % 4), "x")
    shrinks = pytest.raises(ConfirmationNeededError, match="leaves 4 messages that nothing reads")
    with BlockingClient(broker.name_server_addr) as client, shrinks:
        client.admin().create_topic("grown", queue_nums=2)
    shell.run("topic", "create", "grown", "--queues", "4")  # as it is
    for other in (("--queues", "2"), ("--permission", "r"), ("--type", "FIFO")):
        err = shell.run("topic", "create", "grown", *other, status=1)[1]
        assert "with 4 queues to write, 4 to read, RW- and message.type NORMAL; nothing" in err
        assert "dledger topic update grown" in err
    unread = shell.json("topic", "update", "grown", "--queues", "1")["broker-a"]
    assert unread["messages"] == {"grown": 6}
    assert len(shell.json("topic", "info", "grown")["queues"]) == 4
    shell.run("topic", "update", "grown", "--queues", "1", "--yes")
    assert len(shell.json("topic", "info", "grown")["queues"]) == 1


def test_debug_bundle_holds_its_list_and_no_secret(
    broker: EmbeddedBroker, shell: Shell, tmp_path: Path
) -> None:
    log = tmp_path / "n0.log"
    log.write_text('{"event":"settings","raft.secret_file":"/etc/s (toml)"}\n{"event":"elected"}\n')
    target = tmp_path / "bundle.tar.gz"
    tokens = ("debug", "bundle", "--to", str(target), "--logs", str(tmp_path))
    said = shell.json(*tokens)
    with tarfile.open(target) as archive:
        names = [name.removeprefix("dledger-debug/") for name in archive.getnames()]
        texts = {
            name: archive.extractfile(f"dledger-debug/{name}").read().decode()  # type: ignore[union-attr]  # every member is a file
            for name in names
        }
    assert [row["name"] for row in said["holds"]] == names
    assert texts["contents.txt"].split() == [name for name in names if name != "contents.txt"]
    (status,) = [name for name in names if name.endswith("raft_status.json")]
    assert json.loads(texts[status])["serving"] is True
    (settings,) = [n for n in names if n.startswith("brokers/") and n.endswith(".properties")]
    assert "listenPort=" in texts[settings]
    assert '"event":"elected"' in texts["logs/00-n0.log"]
    assert not any("/etc/s" in text for text in texts.values())
    assert target.stat().st_mode & 0o077 == 0
    assert "exists" in shell.run(*tokens, status=2)[1]
