"""Every request of a NameServer has a rule, and the gate stands before all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.namesrv.config import NamesrvConfig
from dledger.namesrv.name_server import NameServer
from dledger.namesrv.processor import NameServerProcessor
from dledger.namesrv.server import NAMESRV_RULES
from dledger.remoting.access.account_file import RELOAD_INTERVAL_S
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.signature import Credentials
from dledger.settings.schema import ConfigFile
from dledger.testing.doubles import InlineExecutor, ManualClock
from tests.unit.namesrv.world import ask, config_in, register, running_namesrv

ACCOUNTS = """\
[accounts.operator]
secret_key = "0123456789"
admin = true
[accounts.service-1]
secret_key = "0123456789"
"""
OPERATOR, SERVICE = Credentials("operator", "0123456789"), Credentials("service-1", "0123456789")


def test_every_code_with_a_handler_has_a_rule_and_no_other(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    handlers = NameServerProcessor(NameServer(config, OsDisk()), ManualClock()).handlers()
    assert {code.name for code in handlers} == {RequestCode(code).name for code in NAMESRV_RULES}


def test_rules_separate_readers_from_administrators() -> None:
    looks = {RequestCode(code).name for code, rule in NAMESRV_RULES.items() if rule is SIGNED}
    assert looks == {
        *("GET_ROUTEINFO_BY_TOPIC", "GET_BROKER_CLUSTER_INFO", "GET_BROKER_MEMBER_GROUP"),
        *("GET_ALL_TOPIC_LIST_FROM_NAMESERVER", "GET_TOPICS_BY_CLUSTER"),
        *("GET_SYSTEM_TOPIC_LIST_FROM_NS", "GET_UNIT_TOPIC_LIST", "GET_HAS_UNIT_SUB_TOPIC_LIST"),
        *("GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST", "GET_KV_CONFIG", "GET_KVLIST_BY_NAMESPACE"),
    }
    assert all(rule in (SIGNED, ADMIN) for rule in NAMESRV_RULES.values())


@pytest.fixture
def accounts(tmp_path: Path) -> Path:
    path = tmp_path / "accounts.toml"
    path.write_text(ACCOUNTS)
    return path


def guarded(accounts: Path) -> NamesrvConfig:
    return config_in(accounts.parent, acl_enable=True, acl_file=str(accounts))


async def test_every_request_is_checked(accounts: Path, autojump_clock: object) -> None:
    async with running_namesrv(guarded(accounts)) as world:
        stranger = await world.connect()
        service = await world.connect(SERVICE)
        operator = await world.connect(OPERATOR)
        for code in NAMESRV_RULES:
            refused = await ask(stranger, RequestCode(code), {"topic": "T1"})
            assert (refused.code, refused.ext["outcome"]) == (1, "not_stored")
            assert "AclException: No accessKey is configured" in (refused.remark or "")
        assert "Need admin permission" in ((await register(service)).remark or "")
        assert (await register(operator)).code == 0
        assert (await ask(service, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "T1"})).code == 0
        changed = await ask(service, RequestCode.UPDATE_NAMESRV_CONFIG, {}, b"x=1")
        assert "Need admin permission" in (changed.remark or "")


async def test_accounts_are_read_again(accounts: Path, autojump_clock: object) -> None:
    async with running_namesrv(guarded(accounts), InlineExecutor()) as world:
        late = await world.connect(Credentials("late-one", "0123456789"))
        lists = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        assert "Check signature failed for accessKey=late-one" in (
            (await ask(late, lists)).remark or ""
        )
        accounts.write_text(ACCOUNTS + '[accounts.late-one]\nsecret_key = "0123456789"\n')
        await trio.sleep(RELOAD_INTERVAL_S * 1.5)
        assert (await ask(late, lists)).code == 0


def test_access_control_needs_accounts() -> None:
    with pytest.raises(ConfigError, match="acl_enable = true: needs server\\.acl_file"):
        NamesrvConfig.load([ConfigFile("namesrv.conf", "aclEnable=true\n")])
