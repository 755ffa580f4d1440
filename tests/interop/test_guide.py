"""The examples of the page about clients of others, run as they stand there."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from dledger.cli.local_cluster import local_cluster
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import TOOLS, needs_cpp_client, needs_js_client
from tests.harness.local_settings import SMALL_FILES
from tests.harness.shipped_files import ROOT
from tests.harness.stored_messages import messages_at

pytestmark = [pytest.mark.slow, needs_cpp_client, needs_js_client]


async def test_the_examples_send_what_they_say(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "other-clients.md").read_text()
    python, javascript = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        await create_topic([cluster.namesrv_address], "orders", queues=4)
        for command, code, says in (
            ([str(TOOLS / "bin" / "python"), "-"], python, "OK"),
            (["node", "-"], javascript, "SEND_OK"),
        ):
            assert "127.0.0.1:9876" in code
            done = subprocess.run(
                command,
                input=code.replace("127.0.0.1:9876", cluster.namesrv_address).encode(),
                capture_output=True,
                cwd=tmp_path,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(tmp_path),
                    "NODE_PATH": str(TOOLS / "node_modules"),
                },
                check=False,
            )
            assert done.returncode == 0, done.stderr.decode()
            # The C++ library may print something of its own before.
            assert done.stdout.decode().split()[-1] == says
        stored = await messages_at(cluster.namesrv_address, "orders")
    assert {(bytes(m.body).decode(), m.properties["TAGS"]) for m in stored} == {
        ("an order from Python", "new"),
        ("an order from JavaScript", "new"),
    }
