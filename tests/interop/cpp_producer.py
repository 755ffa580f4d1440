"""The C++ client as a producer: a request a line comes in, an answer a line goes out.

Runs under an interpreter of its own that has the client and nothing of this project.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from rocketmq.client import Message, Producer, SendResult


def message(asked: dict[str, Any]) -> Message:
    """Return the message that was asked for."""
    made = Message(asked["topic"])
    made.set_body(asked["body"])
    if "tags" in asked:
        made.set_tags(asked["tags"])
    if "keys" in asked:
        made.set_keys(asked["keys"])
    if "delay_level" in asked:
        made.set_delay_time_level(asked["delay_level"])
    for name, value in asked.get("properties", {}).items():
        made.set_property(name, value)
    return made


def stored(result: SendResult) -> dict[str, Any]:
    """Return the broker's answer."""
    return {"status": int(result.status), "msg_id": result.msg_id, "offset": result.offset}


def main(group: str, namesrv: str, timeout_ms: str = "10000") -> None:
    """Send what standard input asks for until it ends.

    Without an answer for so long it sends again, and the message may be stored twice.
    """
    producer = Producer(group, timeout=int(timeout_ms))
    producer.set_namesrv_addr(namesrv)
    producer.start()
    kinds: dict[str, Callable[[dict[str, Any]], Any]] = {
        "sync": lambda asked: stored(producer.send_sync(message(asked))),
        "oneway": lambda asked: producer.send_oneway(message(asked)),
        "orderly": lambda asked: stored(producer.send_orderly(message(asked), asked["shard"])),
        "batch": lambda asked: stored(
            producer.send_batch([message(one) for one in asked["messages"]])
        ),
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = kinds[asked["kind"]](asked) or {}
        except Exception as error:  # noqa: BLE001  # the client's error is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    producer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
