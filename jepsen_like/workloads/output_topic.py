"""The topic that a part of a workload has for itself, made before its clients begin."""

from __future__ import annotations

from typing import Final

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientInstance
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.workloads.recorder import Recorder

ASK_AGAIN_S: Final = 0.5
"""After so long a client asks again where there was no leader, or not yet the topic."""


async def make_topic(
    clients: Recorder, instance: ClientInstance, topic: str, queue_nums: int
) -> None:
    """Make a topic; return when clients know its queues.

    Cancellation: It may have been made.
    """
    while True:
        try:
            await Admin(instance).create_topic(topic, queue_nums=queue_nums)
            if (await instance.route(topic, fresh=True)).publish_queues:
                return
        except MQError:
            pass  # the cluster is still finding its leader
        await clients.sleep(ASK_AGAIN_S)
