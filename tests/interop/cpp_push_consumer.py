"""The C++ client as a push consumer: each message it is given is a line.

Runs under an interpreter of its own that has the client and nothing of this project. A message
whose body ends with ``!`` is refused once, so that it has to come again.
"""

import json
import sys
import threading
from typing import Any

from rocketmq.client import PushConsumer, RecvMessage
from rocketmq.exceptions import ffi_check
from rocketmq.ffi import _CConsumeStatus, dll


def main(group: str, namesrv: str, topic: str, expression: str, order: str) -> None:
    """Consume until standard input ends."""
    lock = threading.Lock()

    def consume(_consumer: Any, handle: Any) -> int:
        received = RecvMessage(handle)
        body = received.body.decode()
        line = json.dumps(
            {
                "topic": received.topic,
                "body": body,
                "tags": received.tags.decode(),
                "keys": received.keys.decode(),
                "id": received.id,
                "queue_id": received.queue_id,
                "queue_offset": received.queue_offset,
                "reconsume_times": received.reconsume_times,
                "origin": (received.get_property("kind") or b"").decode(),
            }
        )
        with lock:
            print(line, flush=True)
        if body.endswith("!") and received.reconsume_times == 0:
            return int(_CConsumeStatus.RECONSUME_LATER)
        return int(_CConsumeStatus.CONSUME_SUCCESS)

    consumer = PushConsumer(group, orderly=order == "orderly")
    consumer.set_namesrv_addr(namesrv)
    consumer.set_thread_count(1 if order == "orderly" else 4)
    # Not by its `subscribe`: with it a message counts as consumed when the callback raises.
    ffi_check(dll.Subscribe(consumer._handle, topic.encode(), expression.encode()))
    consumer._register_callback(consume)
    consumer.start()
    with lock:
        print(json.dumps({"ready": True}), flush=True)
    sys.stdin.read()
    consumer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
