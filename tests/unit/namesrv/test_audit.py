"""Each administrative act at a NameServer has one audit line, and nothing else has one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog.testing
import trio

from dledger.commitlog.errors import ConfigError
from dledger.namesrv.config import NamesrvConfig
from dledger.namesrv.server import LOCAL_ADMIN, NAMESRV_RULES
from dledger.remoting.access.account_file import RELOAD_INTERVAL_S
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.signature import Credentials
from dledger.settings.schema import ConfigFile
from dledger.testing.doubles import InlineExecutor
from tests.unit.namesrv.world import ask, config_in, register, running_namesrv

CODE = RequestCode
SECRET = "hunter2-hunter2"

BY_BROKERS = {
    *(CODE.REGISTER_BROKER, CODE.UNREGISTER_BROKER, CODE.BROKER_HEARTBEAT, CODE.QUERY_DATA_VERSION),
    CODE.REGISTER_TOPIC_IN_NAMESRV,
}
"""What brokers send by themselves, with an account of an administrator."""

ACTS: list[tuple[RequestCode, dict[str, str], bytes, str]] = [
    (CODE.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b"", "brokerName=broker-a"),
    (CODE.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b"", "brokerName=broker-a"),
    (
        CODE.DELETE_TOPIC_IN_NAMESRV,
        {"topic": "T1", "clusterName": "c"},
        b"",
        "topic=T1 clusterName=c",
    ),
    (CODE.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": SECRET}, b"", "namespace=n key=k"),
    (CODE.DELETE_KV_CONFIG, {"namespace": "n", "key": "k"}, b"", "namespace=n key=k"),
    (
        CODE.UPDATE_NAMESRV_CONFIG,
        {},
        b"enableAllTopicList=true\nreturnOrderTopicConfigToBroker=true\n",
        "settings=enableAllTopicList,returnOrderTopicConfigToBroker",
    ),
]

Lines = list[dict[str, Any]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    with structlog.testing.capture_logs() as logged:
        yield cast("Lines", logged)


def audits(lines: Lines) -> list[tuple[str, str, str, str]]:
    return [
        (line["account"], line["request"], line["subject"], line["outcome"])
        for line in lines
        if line["event"] == "audit"
    ]


def test_what_administrators_send_is_an_act_or_known_to_be_none() -> None:
    administrators = {code for code, rule in NAMESRV_RULES.items() if rule is ADMIN}
    looks = {code for code in administrators if CODE(code).name.startswith("GET_")}
    assert administrators - looks - BY_BROKERS == LOCAL_ADMIN
    assert {code for code, *_ in ACTS} == LOCAL_ADMIN


@pytest.mark.parametrize(("code", "ext", "body", "subject"), ACTS, ids=lambda v: str(v)[:40])
async def test_an_act_has_one_line_without_values(
    tmp_path: Path, lines: Lines, code: RequestCode, ext: dict[str, str], body: bytes, subject: str
) -> None:
    async with running_namesrv(config_in(tmp_path)) as world:
        connection = await world.connect()
        await register(connection)
        answer = await ask(connection, code, ext, body)
    assert answer.code == 0, answer.remark
    assert audits(lines) == [("anonymous", code.name, subject, "done")]
    assert SECRET not in str([line for line in lines if line["event"] == "audit"])


async def test_an_act_that_is_refused_has_a_line(tmp_path: Path, lines: Lines) -> None:
    async with running_namesrv(config_in(tmp_path)) as world:
        connection = await world.connect()
        await ask(connection, CODE.UPDATE_NAMESRV_CONFIG, {}, b"noSuchSetting=1\n")
        await ask(connection, CODE.UPDATE_NAMESRV_CONFIG, {}, b"\xff")
        await ask(connection, CODE.PUT_KV_CONFIG, {"namespace": "n"})
    assert audits(lines) == [
        ("anonymous", "UPDATE_NAMESRV_CONFIG", "settings=noSuchSetting", "not_stored"),
        ("anonymous", "UPDATE_NAMESRV_CONFIG", "", "not_stored"),
        ("anonymous", "PUT_KV_CONFIG", "namespace=n", "not_stored"),
    ]


async def test_a_line_has_the_account_that_was_admitted(tmp_path: Path, lines: Lines) -> None:
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(f'[accounts.operator]\nsecret_key = "{SECRET}"\nadmin = true\n')
    config = config_in(tmp_path, acl_enable=True, acl_file=str(accounts))
    async with running_namesrv(config) as world:
        connection = await world.connect(Credentials("operator", SECRET))
        for each, is_admitted in ((connection, True), (await world.connect(), False)):
            answer = await ask(each, CODE.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
            assert (answer.code == 0) is is_admitted
    assert audits(lines) == [
        ("operator", "WIPE_WRITE_PERM_OF_BROKER", "brokerName=broker-a", "done")
    ]


# -- every request of a NameServer has a rule, and the gate stands before all of them


ACCOUNTS = """\
[accounts.operator]
secret_key = "0123456789"
admin = true
[accounts.service-1]
secret_key = "0123456789"
"""
OPERATOR, SERVICE = Credentials("operator", "0123456789"), Credentials("service-1", "0123456789")


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


async def test_every_request_is_checked(accounts: Path) -> None:
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


async def test_accounts_are_read_again(accounts: Path) -> None:
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
