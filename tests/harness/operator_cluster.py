"""A cluster with access checks, and commands in the name of its operator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.main import main
from dledger.remoting.protocol.signature import Credentials
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running

OPERATOR = Credentials("operator", "the secret of the operator")
SERVICE = Credentials("order-service", "the secret of the service")


@contextmanager
def running_guarded(folder: Path, more_accounts: str = "") -> Iterator[LocalCluster]:
    """Run a cluster of real processes in *folder*, with a topic `orders` of one queue.

    Commands of the block are the operator's.

    Args:
        more_accounts: For the file of accounts, beside the operator's.
    """
    accounts = folder / "accounts.toml"
    secret = OPERATOR.secret_key
    accounts.write_text(
        f'[accounts.operator]\nsecret_key = "{secret}"\nadmin = true\n{more_accounts}'
    )
    tools = folder / "operator.toml"
    tools.write_text(f'access_key = "operator"\nsecret_key = "{secret}"\n')
    acl = {"server.acl_enable": True, "server.acl_file": str(accounts)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLEDGER_CREDENTIALS", str(tools))
        with running(lay_out(folder, settings={**SMALL_FILES, **acl})) as found:
            assert dledger(found, "topic", "create", "orders", "--queues", "1") == 0
            yield found


def dledger(cluster: LocalCluster, *words: str) -> int:
    """Run a command on the cluster and return its exit code."""
    return main([*words, "--namesrv", cluster.namesrv_address])


def plain_acl(topic: str, group: str) -> str:
    """Return RocketMQ's file of accounts: the operator, and a service with one topic and group."""
    return f"""\
accounts:
  - accessKey: operator
    secretKey: {OPERATOR.secret_key}
    admin: true
  - accessKey: order-service
    secretKey: {SERVICE.secret_key}
    admin: false
    topicPerms:
      - {topic}=PUB|SUB
    groupPerms:
      - {group}=SUB
"""
