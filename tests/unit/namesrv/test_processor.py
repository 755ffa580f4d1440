"""Every request code of a NameServer, over a connection in memory."""

import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.config import NamesrvConfig
from dledger.namesrv.name_server import NameServer
from dledger.namesrv.processor import NameServerProcessor
from dledger.remoting.connection import Connection
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.present import present
from tests.harness.registrations import encode_compressed
from tests.unit.namesrv.world import (
    World,
    ask,
    broker_ext,
    config_in,
    register,
    register_body,
    route,
    running_namesrv,
)

A, B = "10.0.0.1:10911", "10.0.0.2:10911"
NAMESRV_CODES = {
    100, 101, 102, 103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 311, 312, 313, 318, 319,
    322, 327, 901, 904,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> NamesrvConfig:
    return config_in(tmp_path)


@pytest.fixture
async def world(config: NamesrvConfig) -> AsyncIterator[World]:
    async with running_namesrv(config) as started:
        yield started


@pytest.fixture
async def connection(world: World) -> Connection:
    return await world.connect()


def table_of(body: object) -> dict[str, object]:
    loaded = json.loads(bytes(body))  # type: ignore[call-overload]  # bytes or a view, checked here
    assert isinstance(loaded, dict)
    return loaded


async def test_every_code_of_a_nameserver_has_a_handler(config: NamesrvConfig) -> None:
    processor = NameServerProcessor(NameServer(config, OsDisk()), TrioClock())
    assert set(processor.handlers()) == NAMESRV_CODES


async def test_an_unknown_topic_is_17_with_rocketmq_s_words(connection: Connection) -> None:
    answer = await ask(connection, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "X"})
    assert (answer.code, answer.remark) == (
        17,
        "No topic route info in name server for the topic: X\n"
        "See http://rocketmq.apache.org/docs/faq/ for further details.",
    )


async def test_the_route_is_answered_byte_for_byte_in_both_dialects(connection: Connection) -> None:
    await register(connection, A, 0, register_body(["T1", "T2"], filters=["10.0.0.1:40000"]))
    await register(connection, B, 1)
    standard = (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"},'
        b'"brokerName":"broker-a","cluster":"DefaultCluster"}],'
        b'"filterServerTable":{"10.0.0.1:10911":["10.0.0.1:40000"]},'
        b'"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,'
        b'"topicSysFlag":0,"writeQueueNums":4}]}'
    )
    fastjson = standard.replace(b'"0":', b"0:").replace(b'"1":', b"1:")
    ext = {"topic": "T1"}
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    for version, more, body in (
        (401, {}, standard),
        (479, {}, standard),
        (400, {}, fastjson),
        (63, {}, fastjson),
        (63, {"acceptStandardJsonOnly": "true"}, standard),
    ):
        answer = await ask(connection, code, {**ext, **more}, version=version)
        assert (answer.code, bytes(answer.body)) == (0, body)


async def test_rules_6_and_7_answer_a_follower(connection: Connection) -> None:
    await ask(
        connection,
        RequestCode.PUT_KV_CONFIG,
        {"namespace": "ORDER_TOPIC_CONFIG", "key": "T1", "value": "broker-a:4"},
    )
    leader = await register(connection, A, 0)
    assert (leader.code, leader.ext) == (0, {})
    assert table_of(leader.body) == {"table": {"T1": "broker-a:4"}}
    follower = await register(connection, B, 1)
    assert follower.ext == {"haServerAddr": "10.0.0.1:10912", "masterAddr": A}


async def test_a_compressed_registration_is_understood(connection: Connection) -> None:
    data = encode_compressed(register_body(["T1", "T5"], filters=["f:1"]))
    ext = broker_ext(
        haServerAddr="", compressed="true", bodyCrc32=str(zlib.crc32(data) & 0x7FFFFFFF)
    )
    assert (await ask(connection, RequestCode.REGISTER_BROKER, ext, data)).code == 0
    found = present(await route(connection, "T5"))
    assert found.filter_server_table == {A: ["f:1"]}


async def test_registration_names_a_missing_field(connection: Connection) -> None:
    answer = await ask(connection, RequestCode.REGISTER_BROKER, {"brokerName": "a"})
    assert (answer.code, answer.remark) == (1, "the custom field brokerAddr is null")


OURS, OTHER = "0f" * 16, "e1" * 16


async def test_second_group_is_shown_to_operators(
    world: World, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    await register(connection, A, 0, groupIdentity=OURS)
    stranger = await world.connect()
    for identity in ({}, {"groupIdentity": OTHER}, {"groupIdentity": OTHER}):
        answer = await register(stranger, B, 0, register_body(state=2**62), **identity)
        assert answer.code == 1
        assert f"belongs to the group {OURS}" in (answer.remark or "")
    answer = await ask(connection, RequestCode.GET_BROKER_CLUSTER_INFO, {})
    (sentence,) = json.loads(str(answer.ext["refusedBrokers"]))
    assert sentence.startswith(f"{B} is refused as broker-a: ")
    assert OTHER in sentence
    # Once for each reason, however often it tries.
    assert capsys.readouterr().out.count("registration_refused") == 2
    found = present(await route(connection))
    assert found.broker_datas[0].broker_addrs == {0: A}


async def test_a_stranger_unregisters_no_member(world: World, connection: Connection) -> None:
    await register(connection, A, 0, groupIdentity=OURS)
    stranger = await world.connect()
    for ext in (broker_ext(A, 0), broker_ext(A, 0, groupIdentity=OTHER)):
        answer = await ask(stranger, RequestCode.UNREGISTER_BROKER, ext)
        assert answer.code == 1
        assert "alone may unregister it" in (answer.remark or "")
    assert await route(connection) is not None
    own = broker_ext(A, 0, groupIdentity=OURS)
    answers = [await ask(stranger, RequestCode.UNREGISTER_BROKER, own) for _ in range(2)]
    assert [(answer.code, answer.remark) for answer in answers] == [
        (0, None),
        (0, "it is not registered"),
    ]
    assert await route(connection) is None


async def test_a_topic_that_is_left_out_is_named_in_the_answer(connection: Connection) -> None:
    body = register_body(["T1", "T2"])
    table = body.topic_config_serialize_wrapper.topic_config_table
    table["T2"].topic_sys_flag = -1
    answer = await register(connection, A, 0, body)
    assert answer.code == 0
    left_out = "'T2': topicSysFlag -1 is not between 0 and 2147483647"
    assert answer.ext["topicsLeftOut"] == left_out
    assert await route(connection, "T1") is not None
    assert await route(connection, "T2") is None


async def test_group_kept_out_of_a_topic_is_named_once(connection: Connection) -> None:
    await register(connection, A, 0, groupIdentity="0f" * 16)
    with capture_logs() as lines:
        for _ in range(3):
            answer = await register(
                connection, B, 0, None, brokerName="thief", groupIdentity="e1" * 16
            )
    assert "the group of broker-a serves it" in answer.ext["topicsLeftOut"]
    assert [line["event"] for line in lines].count("topics_left_out") == 1
    info = await ask(connection, RequestCode.GET_BROKER_CLUSTER_INFO, {})
    assert "thief: topics are left out: 'T1'" in info.ext["refusedBrokers"]
    found = present(await route(connection))
    assert [data.broker_name for data in found.broker_datas] == ["broker-a"]


async def test_deposed_leader_gets_the_leaders_address(connection: Connection) -> None:
    await register(connection, A, 0, register_body(state=6))
    answer = await register(connection, B, 0, register_body(state=5))
    assert (answer.code, answer.ext, bytes(answer.body)) == (0, {"keptBy": A}, b"")
    found = present(await route(connection))
    assert found.broker_datas[0].broker_addrs == {0: A}


async def test_data_version_decides_a_registration(connection: Connection) -> None:
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    code = RequestCode.QUERY_DATA_VERSION
    unknown = await ask(connection, code, broker_ext(A, 0), json.dumps(version).encode())
    assert (unknown.ext["changed"], bytes(unknown.body)) == ("true", b"")
    await register(connection, A, 0)
    same = await ask(connection, code, broker_ext(A, 0), json.dumps(version).encode())
    assert (same.ext["changed"], table_of(same.body)) == ("false", version)
    newer = json.dumps({**version, "counter": 2}).encode()
    other = await ask(connection, code, broker_ext(A, 0), newer)
    assert (other.ext["changed"], table_of(other.body)) == ("true", version)


async def test_clusters_and_members_are_listed(connection: Connection) -> None:
    await register(connection, A, 0)
    await register(connection, B, 1)
    info = await ask(connection, RequestCode.GET_BROKER_CLUSTER_INFO)
    assert table_of(info.body) == {
        "brokerAddrTable": {
            "broker-a": {
                "brokerAddrs": {"0": A, "1": B},
                "brokerName": "broker-a",
                "cluster": "DefaultCluster",
            }
        },
        "clusterAddrTable": {"DefaultCluster": ["broker-a"]},
    }
    group = await ask(
        connection,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        {"clusterName": "DefaultCluster", "brokerName": "broker-a"},
    )
    assert table_of(group.body) == {
        "brokerMemberGroup": {
            "brokerAddrs": {"0": A, "1": B},
            "brokerName": "broker-a",
            "cluster": "DefaultCluster",
        }
    }


async def test_topics_are_listed_by_each_code(connection: Connection) -> None:
    await register(connection, A, 0)
    listed = await ask(connection, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert table_of(listed.body) == {"topicList": ["T1", "T2"]}
    of_cluster = await ask(
        connection, RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "DefaultCluster"}
    )
    assert table_of(of_cluster.body) == {"topicList": ["T1", "T2"]}
    system = await ask(connection, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    assert table_of(system.body) == {"brokerAddr": A, "topicList": ["DefaultCluster", "broker-a"]}
    for code in (
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    ):
        assert table_of((await ask(connection, code)).body) == {"topicList": []}


async def test_write_permission_is_wiped_and_added_with_a_count(connection: Connection) -> None:
    await register(connection, A, 0)
    name = {"brokerName": "broker-a"}
    wiped = await ask(connection, RequestCode.WIPE_WRITE_PERM_OF_BROKER, name)
    assert wiped.ext == {"wipeTopicCount": "2"}
    found = present(await route(connection))
    assert found.queue_datas[0].perm == 4
    added = await ask(connection, RequestCode.ADD_WRITE_PERM_OF_BROKER, name)
    assert added.ext == {"addTopicCount": "2"}
    found = present(await route(connection))
    assert found.queue_datas[0].perm == 6


async def test_topics_are_entered_and_deleted_by_hand(connection: Connection) -> None:
    await register(connection, A, 0)
    body = (
        b'{"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":2,"writeQueueNums":2}]}'
    )
    code = RequestCode.REGISTER_TOPIC_IN_NAMESRV
    assert (await ask(connection, code, {"topic": "T9"}, body)).code == 0
    found = present(await route(connection, "T9"))
    assert found.queue_datas[0].read_queue_nums == 2
    await ask(connection, RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "T9"})
    assert await route(connection, "T9") is None


async def test_key_values_are_put_read_listed_and_deleted(connection: Connection) -> None:
    key = {"namespace": "ns", "key": "k"}
    missing = await ask(connection, RequestCode.GET_KV_CONFIG, key)
    assert (missing.code, missing.remark) == (22, "No config item, Namespace: ns Key: k")
    listed = await ask(connection, RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "ns"})
    assert (listed.code, listed.remark) == (22, "No config item, Namespace: ns")
    await ask(connection, RequestCode.PUT_KV_CONFIG, {**key, "value": "v"})
    assert (await ask(connection, RequestCode.GET_KV_CONFIG, key)).ext == {"value": "v"}
    listed = await ask(connection, RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "ns"})
    assert table_of(listed.body) == {"table": {"k": "v"}}
    await ask(connection, RequestCode.DELETE_KV_CONFIG, key)
    assert (await ask(connection, RequestCode.GET_KV_CONFIG, key)).code == 22


async def test_ordered_topics_join_the_route_when_enabled(connection: Connection) -> None:
    await register(connection, A, 0)
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T1"}
    await ask(connection, RequestCode.PUT_KV_CONFIG, {**order, "value": "broker-a:4"})
    found = present(await route(connection))
    assert found.order_topic_conf is None
    code = RequestCode.UPDATE_NAMESRV_CONFIG
    assert (await ask(connection, code, body=b"orderMessageEnable=true\n")).code == 0
    found = present(await route(connection))
    assert found.order_topic_conf == "broker-a:4"
    await ask(connection, RequestCode.DELETE_KV_CONFIG, order)
    found = present(await route(connection))
    assert found.order_topic_conf is None


async def test_settings_are_shown_under_rocketmq_s_names(connection: Connection) -> None:
    text = bytes((await ask(connection, RequestCode.GET_NAMESRV_CONFIG)).body).decode()
    assert "listenPort=9876\n" in text
    assert "orderMessageEnable=false\n" in text
    assert "returnOrderTopicConfigToBroker=true\n" in text


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"kvConfigPath=/etc/passwd", 16, "Can not update config in black list: kvConfigPath"),
        (b"rocketmqHome=/", 16, "Can not update config in black list: rocketmqHome"),
        (b"useTLS=true", 1, "useTLS has no meaning here"),
        (
            b"listenPort=1",
            1,
            "listenPort cannot change while the NameServer runs: set it in the configuration and"
            " restart",
        ),
        (b"orderMessageEnable=true\nnope=1", 1, "unknown setting nope"),
        (b"orderMessageEnable=maybe", 1, "orderMessageEnable = 'maybe': expected true or false"),
        (b"\xff", 1, None),
    ],
)
async def test_a_bad_change_of_settings_changes_none_of_them(
    connection: Connection, body: bytes, code: int, remark: str | None
) -> None:
    before = (await ask(connection, RequestCode.GET_NAMESRV_CONFIG)).body
    answer = await ask(connection, RequestCode.UPDATE_NAMESRV_CONFIG, body=body)
    assert answer.code == code
    if remark is not None:
        assert answer.remark == remark
    assert (await ask(connection, RequestCode.GET_NAMESRV_CONFIG)).body == before


async def test_the_list_of_all_topics_can_be_switched_off(connection: Connection) -> None:
    await ask(connection, RequestCode.UPDATE_NAMESRV_CONFIG, body=b"enableAllTopicList=false")
    answer = await ask(connection, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert (answer.code, answer.remark) == (1, "disable")


async def test_nameserver_with_a_wait_answers_no_route_at_first(tmp_path: Path) -> None:
    config = config_in(tmp_path, need_wait_for_service=True, wait_seconds_for_service=45)
    async with running_namesrv(config) as world:
        connection = await world.connect()
        await register(connection, A, 0)
        ext = {"topic": "T1"}
        answer = await ask(connection, RequestCode.GET_ROUTEINFO_BY_TOPIC, ext)
        assert (answer.code, answer.remark) == (1, "name server not ready")
        await trio.sleep(45)
        assert await route(connection) is not None


async def test_an_unknown_code_is_answered_3(connection: Connection) -> None:
    answer = await ask(connection, RequestCode.SEND_MESSAGE)
    assert answer.code == 3
