"""Every command of RocketMQ's `mqadmin`, 4.9.7 and 5.5.0, does what its page states.

The tool is not changed in any way; each version runs in one process. With ``DLEDGER_WRITE_PAGES=1``
the page is written instead of compared.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.local_cluster import local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import (
    JAVA_VERSIONS,
    ForeignClient,
    compile_java,
    foreign_client,
    needs_java,
)
from tests.harness.local_settings import SMALL_FILES
from tests.harness.mqadmin_commands import (
    ACCOUNTS,
    COMMANDS,
    ENDLESS,
    OLDER,
    PAGE,
    SHOWS,
    WORKS,
    outcome,
    stated,
    written,
)
from tests.harness.stored_messages import committed_behind, stored_in

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_java]

SETTINGS = {**SMALL_FILES, "broker.trace_topic_enable": True}
LIMIT_MS = 30_000
ENDLESS_MS = 3_000
NEW_GROUPS = [{"groupName": "listed"}]
NEW_TOPICS = [{"topicName": "Listed", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}]


async def consume(*_batch: object) -> None:
    """Take what comes."""


def values(folder: Path, leader: str, message: MessageExt) -> dict[str, str]:
    """Return what the words of commands name."""
    topics, groups = folder / "topics.json", folder / "groups.json"
    empty = folder / "empty"
    empty.touch()
    topics.write_text(json.dumps(NEW_TOPICS))
    groups.write_text(json.dumps(NEW_GROUPS))
    return {
        "leader": leader,
        "folder": str(folder),
        "topics_file": str(topics),
        "groups_file": str(groups),
        "empty_file": str(empty),
        "no_file": str(folder / "missing"),
        "message_id": message.offset_message_id,
        "unique_key": message.message_id,
        "before": str(message.record.store_timestamp_ms - 60_000),
        "after": str(message.record.store_timestamp_ms + 3_600_000),
    }


async def run_all(admin: ForeignClient, version: str, named: dict[str, str], namesrv: str) -> Any:
    """Return the outcome of each command that this version has."""
    (there,) = [line["commands"] for line in admin.lines if "commands" in line]
    assert there.keys() - ACCOUNTS <= COMMANDS.keys()
    found, wrong = {}, {}
    older = OLDER if version == JAVA_VERSIONS[0] else {}
    for command in COMMANDS:
        if command not in there:
            continue
        words = older.get(command, COMMANDS[command]).format_map(named).split()
        limit_ms = ENDLESS_MS if command in ENDLESS else LIMIT_MS
        asked = {"words": [command, *words, "-n", namesrv], "limit_ms": limit_ms}
        answer = await admin.ask(asked)
        printed = answer["printed"]
        found[command] = outcome(command, printed, ended=answer["ended"])
        if not found[command] or (
            found[command] == WORKS and SHOWS.get(command, "") not in printed
        ):
            wrong[command] = printed
    assert not wrong, "".join(f"\n{command}: {printed}" for command, printed in wrong.items())
    return found


async def test_each_command_works_or_shows_a_reason(tmp_path: Path) -> None:
    outcomes: dict[str, dict[str, str]] = {}
    async with local_cluster(tmp_path / "cluster", settings=SETTINGS) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "Orders", queues=1)
        leader = cluster.brokers[await cluster.wait_leader()].address
        async with (
            connect([namesrv]) as sdk,
            Producer(sdk, "senders", ProducerConfig(enable_msg_trace=True)) as producer,
            PushConsumer(sdk, "workers", consume, {"Orders": "*"}),
            PullConsumer(sdk, "idle") as idle,
        ):
            await producer.send(Message("Orders", b"one", tags="A", keys="order-1"))
            (message,) = (await stored_in(sdk, "Orders")).values()
            await committed_behind(sdk, "workers", "Orders", [message])
            (queue,) = await idle.fetch_message_queues("Orders")
            await idle.commit_offset(queue, 1)
            for version in JAVA_VERSIONS:
                command = compile_java(version, tmp_path / version, "Lines", "MqAdmin")
                home = tmp_path / f"home-{version}"
                (home / "conf").mkdir(parents=True)
                (home / "conf" / "logback_tools.xml").write_text("<configuration/>")
                program = (*command, f"-Drocketmq.home.dir={home}", f"-Duser.home={home}")
                async with foreign_client(home, "mqadmin", command=(*program, "MqAdmin")) as admin:
                    named = values(home, leader, message)
                    outcomes[version] = await run_all(admin, version, named, namesrv)
    if os.environ.get("DLEDGER_WRITE_PAGES"):
        PAGE.write_text(written(outcomes))
    page = stated()
    differ = {
        f"{command} {version}": (page[command][place], found)
        for place, version in enumerate(JAVA_VERSIONS)
        for command, found in outcomes[version].items()
        if page[command][place] != found
    }
    assert differ == {}, "what the page states, and what is so"
    assert page.keys() == COMMANDS.keys()
