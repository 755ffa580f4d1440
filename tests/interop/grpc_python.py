"""Apache's Python client of the gRPC protocol, in one of four parts.

Runs under an interpreter of its own that has the client and nothing of this project. A request a
line comes in, lines of JSON go out.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

AWAIT_S = 5
INVISIBLE_S = 20
SENDERS = 8

_writing = threading.Lock()


def put(**line: Any) -> None:
    """Write one line."""
    with _writing:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def configuration(endpoints: str) -> ClientConfiguration:
    """Return the settings of a client of these proxies."""
    return ClientConfiguration(endpoints, Credentials(), request_timeout=5)


# ---------------------------------------------------------------------------------- producer


class Checker(TransactionChecker):
    """Commits what is asked about, and reports it."""

    def check(self, message: Any) -> Any:
        put(checked=message.body.decode(), message_id=message.message_id)
        return TransactionResolution.COMMIT


def made(asked: dict[str, Any]) -> Any:
    """Return the message that is asked for."""
    message = Message()
    message.topic = asked["topic"]
    message.body = asked["body"].encode()
    if "tags" in asked:
        message.tag = asked["tags"]
    if "keys" in asked:
        message.keys = asked["keys"]
    if "group" in asked:
        message.message_group = asked["group"]
    if "deliver_in_s" in asked:
        message.delivery_timestamp = int(time.time()) + asked["deliver_in_s"]
    for name, value in asked.get("properties", {}).items():
        message.add_property(name, value)
    return message


def sent(producer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Send one message and return the answer."""
    message = made(asked)
    if "transaction" not in asked:
        receipt = producer.send(message)
    else:
        transaction = producer.begin_transaction()
        receipt = producer.send(message, transaction)
        if asked["transaction"] == "commit":
            transaction.commit()
        elif asked["transaction"] == "rollback":
            transaction.rollback()
    answer = {"message_id": receipt.message_id, "offset": receipt.offset}
    if asked.get("recall"):
        answer["recalled"] = producer.recall_message(asked["topic"], receipt.recall_handle)
    return answer


def send_many(producer: Any, topic: str, wanted: int) -> None:
    """Send until *wanted* messages are acknowledged; each of them is a line."""
    acknowledged = 0
    number = 0
    counting = threading.Lock()

    def keep_sending() -> None:
        nonlocal acknowledged, number
        while True:
            with counting:
                if acknowledged >= wanted:
                    return
                body, number = f"m{number:06d}", number + 1
            try:
                answer = sent(producer, {"topic": topic, "body": body, "tags": "F", "keys": body})
            except Exception as error:  # noqa: BLE001  # whatever the client raises
                put(failed=body, error=f"{type(error).__name__}: {error}")
                continue
            with counting:
                acknowledged += 1
            put(acknowledged=body, **answer)

    senders = [threading.Thread(target=keep_sending) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    put(done=wanted)


def produce(endpoints: str, *topics: str) -> None:
    """Send what standard input asks for until it ends."""
    producer = Producer(configuration(endpoints), topics, checker=Checker())
    producer.startup()
    put(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "many" in asked:
            send_many(producer, asked["topic"], asked["many"])
            continue
        try:
            put(**sent(producer, asked))
        except Exception as error:  # noqa: BLE001  # whatever the client raises
            put(error=f"{type(error).__name__}: {error}", code=getattr(error, "code", None))
    producer.shutdown()


# ---------------------------------------------------------------------------------- consumers


def seen(message: Any) -> dict[str, Any]:
    """Return what is compared of a message."""
    return {
        "body": message.body.decode(),
        "tags": message.tag,
        "keys": sorted(message.keys),
        "properties": dict(message.properties),
        "group": message.message_group,
        "message_id": message.message_id,
        "attempt": message.delivery_attempt,
        "type": message.message_type,
        "corrupted": message.corrupted,
        "stored_ms": message.store_timestamp if hasattr(message, "store_timestamp") else None,
        "received_ms": int(time.time() * 1000),
    }


def when_input_ends(stop: Callable[[], None]) -> None:
    """Call *stop* when standard input ends."""

    def wait() -> None:
        sys.stdin.read()
        stop()

    threading.Thread(target=wait, daemon=True).start()


def receive(endpoints: str, group: str, topic: str, expression: str) -> None:
    """Receive and acknowledge; what begins with ``again`` is refused once, for a second."""
    consumer = SimpleConsumer(
        configuration(endpoints), group, {topic: FilterExpression(expression)}, AWAIT_S
    )
    consumer.startup()
    stopped = threading.Event()
    when_input_ends(stopped.set)
    put(ready=True)

    def settle(message: Any) -> None:
        try:
            if message.body.startswith(b"again") and message.delivery_attempt == 1:
                consumer.change_invisible_duration(message, 1)
            else:
                consumer.ack(message)
                put(settled=message.message_id)
        except Exception as error:  # noqa: BLE001  # it comes again
            put(unsettled=message.message_id, error=f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(SENDERS) as workers:
        while not stopped.is_set():
            try:
                messages = consumer.receive(32, INVISIBLE_S)
            except Exception as error:  # noqa: BLE001  # the next call goes to another proxy
                put(no_answer=f"{type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            for message in messages:
                put(**seen(message))
            list(workers.map(settle, messages))
    consumer.shutdown()


class Listener(MessageListener):
    """Reports what comes; refuses what begins with ``again`` once, and waits with ``slow``."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s

    def consume(self, message: Any) -> Any:
        put(**seen(message))
        if message.body.startswith(b"slow"):
            time.sleep(self.slow_s)
            put(waited=message.message_id)
        if message.body.startswith(b"again") and message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        return ConsumeResult.SUCCESS


def push(endpoints: str, group: str, topic: str, expression: str, slow_s: str = "0") -> None:
    """Consume with a listener until standard input ends."""
    consumer = PushConsumer(
        configuration(endpoints),
        group,
        Listener(float(slow_s)),
        {topic: FilterExpression(expression)},
    )
    consumer.startup()
    put(ready=True)
    sys.stdin.read()
    consumer.shutdown()


# ---------------------------------------------------------------------------------- load


def report(kind: str, key: str, reason: str = "") -> None:
    """Write one event of a load."""
    put(kind=kind, key=key, at_ms=time.monotonic_ns() // 1_000_000, reason=reason)


class Reporter(MessageListener):
    """Reports what comes."""

    def consume(self, message: Any) -> Any:
        report("consumed", message.body.decode())
        return ConsumeResult.SUCCESS


def load(endpoints: str, prefix: str, period_ms: str) -> None:
    """Be an application: a producer, and a push consumer each of a plain and of an ordered topic.

    All settings are the client's defaults. A line that comes in ends the sending, the end of
    standard input all.
    """
    settings = ClientConfiguration(endpoints, Credentials())
    streams = {"plain": {}, "ordered": {"group": "one"}}
    topics = {stream: f"{prefix}-{stream}" for stream in streams}
    for topic in topics.values():
        PushConsumer(settings, topic, Reporter(), {topic: FilterExpression("*")}).startup()
    producer = Producer(settings, tuple(topics.values()))
    producer.startup()
    stopped = threading.Event()

    def keep_sending(stream: str) -> None:
        number = 0
        while not stopped.wait(int(period_ms) / 1000):
            key, number = f"{stream}-{number}", number + 1
            try:
                sent(producer, {"topic": topics[stream], "body": key, **streams[stream]})
                report("sent", key)
            except Exception as error:  # noqa: BLE001  # whatever the client raises
                report("failed", key, f"{type(error).__name__}: {error}")

    for stream in streams:
        threading.Thread(target=keep_sending, args=(stream,), daemon=True).start()
    sys.stdin.readline()
    stopped.set()
    sys.stdin.read()
    os._exit(0)


PARTS: dict[str, Callable[..., None]] = {f.__name__: f for f in (produce, receive, push, load)}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
