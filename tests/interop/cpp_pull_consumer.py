"""The C++ client as a pull consumer: everything a topic holds, a message a line.

Runs under an interpreter of its own that has the client and nothing of this project.
"""

import json
import sys

from rocketmq.client import PullConsumer


def main(group: str, namesrv: str, topic: str, expression: str) -> None:
    """Read every queue of *topic* to its end."""
    consumer = PullConsumer(group)
    consumer.set_namesrv_addr(namesrv)
    consumer.start()
    for received in consumer.pull(topic, expression):
        line = {
            "topic": received.topic,
            "body": received.body.decode(),
            "tags": received.tags.decode(),
            "keys": received.keys.decode(),
            "queue_id": received.queue_id,
            "queue_offset": received.queue_offset,
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"end": True}), flush=True)
    consumer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
