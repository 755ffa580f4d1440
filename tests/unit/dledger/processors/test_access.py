"""Requests about accounts: what is stored, what is answered, and that no secret leaves again."""

import json
from typing import Any, cast

import pytest
import structlog.testing

from dledger.processors.access import PASSED_ON, AccessProcessor
from dledger.processors.handles import Limit, handlers_of
from dledger.remoting.errors import ConnectFailedError, RequestTimedOutError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import OUTCOME_FIELD
from dledger.remoting.protocol.signature import FORM, FRESH_FORM, Credentials
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.accounts import AccountConfig, PolicyConfig
from dledger.state.topics import ACCESS_QUEUE
from tests.harness import pops, pulls
from tests.harness.broker import Broker
from tests.harness.fake_group import LEADER

CODE = RequestCode
SECRET = "hunter2-hunter2"
NAME = "order-service"
LIMITERS = {limit: Limiter(limit.value, 100) for limit in Limit}
IN_FILE = "operator"


class Leader:
    """Stands for the leader; keeps what was asked and answers as *answered*."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, RemotingCommand]] = []
        self.error: Exception | None = None
        self.code = 0

    async def __call__(self, address: str, command: RemotingCommand) -> RemotingCommand:
        self.asked.append((address, command))
        if self.error is not None:
            raise self.error
        return response_to(command, self.code, "as the leader answers", {OUTCOME_FIELD: "stored"})


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def access(broker: Broker, leader: Leader) -> Broker:
    """The processors of a broker with those for accounts, as the daemon registers them."""
    processor = AccessProcessor(broker.group, broker.settings, lambda name: name == IN_FILE, leader)
    broker.processors.handlers |= handlers_of([processor], LIMITERS, broker.group)
    return broker


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def create(access: Broker, name: str = NAME, **fields: Any) -> RemotingCommand:
    user = body(password=SECRET, **fields)
    return access.call(CODE.AUTH_CREATE_USER, {"username": name}, user)


def put_acl(access: Broker, subject: str, *entries: dict[str, Any], **more: Any) -> RemotingCommand:
    acl = body(policies=[{"entries": entries}], **more)
    return access.call(CODE.AUTH_CREATE_ACL, {"subject": subject}, acl)


ORDERS = {"resource": "Topic:orders", "actions": ["Pub", "Sub"], "decision": "Allow"}


def test_users_are_made_changed_shown_and_deleted(access: Broker) -> None:
    assert create(access, userType="Super").code == 0
    assert create(access, "other-service", userStatus="disable").code == 0
    shown = access.call(CODE.AUTH_GET_USER, {"username": NAME})
    assert json.loads(bytes(shown.body)) == {
        "username": NAME,
        "userType": "Super",
        "userStatus": "enable",
    }
    listed = access.call(CODE.AUTH_LIST_USER, {"filter": "other"})
    assert [user["userStatus"] for user in json.loads(bytes(listed.body))] == ["disable"]
    changed = access.call(CODE.AUTH_UPDATE_USER, {"username": NAME}, body(userType="Normal"))
    assert changed.code == 0
    assert access.group.state.accounts[NAME] == AccountConfig(NAME, SECRET)
    assert access.call(CODE.AUTH_DELETE_USER, {"username": NAME}).code == 0
    assert sorted(access.group.state.accounts) == ["other-service"]
    gone = access.call(CODE.AUTH_GET_USER, {"username": NAME})
    assert (gone.code, bytes(gone.body)) == (0, b"")


def test_a_repeated_request_is_answered_without_a_record(access: Broker) -> None:
    """A tool sends it to every member, and followers pass it on."""
    create(access)
    put_acl(access, f"User:{NAME}", ORDERS)
    before = access.group.state.access_counter
    assert create(access).code == 0
    assert put_acl(access, f"User:{NAME}", ORDERS).code == 0
    assert access.call(CODE.AUTH_DELETE_USER, {"username": "never-there"}).code == 0
    assert access.call(CODE.DELETE_ACL_CONFIG, {"accessKey": "never-there"}).code == 0
    assert access.group.state.access_counter == before


def test_account_that_is_as_wanted_is_confirmed_by_leaders_only(access: Broker) -> None:
    create(access, userType="Normal")
    same = request(CODE.AUTH_UPDATE_USER, {"username": NAME}, body(userType="Normal"))
    absent = request(CODE.AUTH_DELETE_USER, {"username": "never-there"})
    entries = access.group.log.last_index
    access.group.barriers_pass = False
    for command in (same, absent):
        assert access.handle(command) is DEFERRED
        access.group.pass_barriers()
        assert access.connection.replies.pop()[1].code == 0
    assert access.group.log.last_index == entries
    for command in (same, absent):
        assert access.handle(command) is DEFERRED
    access.group.step_down("elsewhere:1")
    refused = [answer for _, answer in access.connection.replies[-2:]]
    assert [(answer.code, answer.ext["leaderAddr"]) for answer in refused] == [
        (14, "elsewhere:1"),
        (14, "elsewhere:1"),
    ]


def test_another_user_of_that_name_is_refused(access: Broker) -> None:
    create(access)
    other = access.call(CODE.AUTH_CREATE_USER, {"username": NAME}, body(password="another-one"))
    assert (other.code, other.ext[OUTCOME_FIELD]) == (ResponseCode.NO_PERMISSION, "not_stored")
    assert "exists already" in str(other.remark)
    assert access.group.state.accounts[NAME].secret_key == SECRET


def test_policies_are_put_shown_and_deleted(access: Broker) -> None:
    create(access)
    source = {**ORDERS, "resource": "Group:*", "actions": ["Sub"], "sourceIps": ["10.0.0.0/8"]}
    assert put_acl(access, f"User:{NAME}", ORDERS, source).code == 0
    assert access.group.state.accounts[NAME].policies == (
        PolicyConfig("Custom", "Topic:orders", ("Pub", "Sub"), (), "Allow"),
        PolicyConfig("Custom", "Group:*", ("Sub",), ("10.0.0.0/8",), "Allow"),
    )
    shown = access.call(CODE.AUTH_GET_ACL, {"subject": f"User:{NAME}"})
    assert json.loads(bytes(shown.body)) == {
        "subject": f"User:{NAME}",
        "policies": [{"policyType": "Custom", "entries": [{**ORDERS, "sourceIps": []}, source]}],
    }
    listed = access.call(CODE.AUTH_LIST_ACL, {"subjectFilter": "order", "resourceFilter": "Group"})
    ((policy,),) = [acl["policies"] for acl in json.loads(bytes(listed.body))]
    assert [entry["resource"] for entry in policy["entries"]] == ["Group:*"]
    named = {"subject": f"User:{NAME}", "resource": "Topic:orders"}
    assert access.call(CODE.AUTH_DELETE_ACL, named).code == 0
    assert [entry.resource for entry in access.group.state.accounts[NAME].policies] == ["Group:*"]
    assert access.call(CODE.AUTH_DELETE_ACL, {"subject": f"User:{NAME}"}).code == 0
    none = access.call(CODE.AUTH_GET_ACL, {"subject": f"User:{NAME}"})
    assert (none.code, bytes(none.body)) == (0, b"")


def test_access_configs_of_acl_1_are_answered(access: Broker) -> None:
    config = {
        "accessKey": NAME,
        "secretKey": SECRET,
        "admin": "false",
        "whiteRemoteAddress": "10.0.0.*",
        "defaultTopicPerm": "DENY",
        "defaultGroupPerm": "SUB",
        "topicPerms": "orders=PUB|SUB,audit=DENY",
    }
    assert access.call(CODE.UPDATE_AND_CREATE_ACL_CONFIG, config).code == 0
    white = {"globalWhiteAddrs": "10.9.9.9,10.8.*.*", "aclFileFullPath": "plain_acl.yml"}
    assert access.call(CODE.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, white).code == 0
    shown = access.call(CODE.GET_BROKER_CLUSTER_ACL_CONFIG)
    assert json.loads(bytes(shown.body)) == {
        "globalWhiteAddrs": ["10.9.9.9", "10.8.*.*"],
        "plainAccessConfigs": [
            {
                "accessKey": NAME,
                "whiteRemoteAddress": "10.0.0.*",
                "admin": False,
                "defaultTopicPerm": "DENY",
                "defaultGroupPerm": "SUB",
                "topicPerms": ["audit=DENY", "orders=PUB|SUB"],
                "groupPerms": [],
            }
        ],
    }
    version = access.call(CODE.GET_BROKER_CLUSTER_ACL_INFO)
    assert json.loads(str(version.ext["version"]))["counter"] == 2
    assert json.loads(str(version.ext["allAclFileVersion"]))[STATE_TOPIC]["counter"] == 2
    assert version.ext["brokerAddr"] == LEADER
    assert access.call(CODE.DELETE_ACL_CONFIG, {"accessKey": NAME}).code == 0
    assert access.group.state.accounts == {}


def test_changes_in_flight_count(access: Broker) -> None:
    """The second decides on what the first will have made."""
    create(access)
    asked = [
        request(CODE.AUTH_UPDATE_USER, {"username": NAME}, body(userType="Super")),
        request(CODE.AUTH_UPDATE_USER, {"username": NAME}, body(userStatus="disable")),
        request(CODE.AUTH_DELETE_USER, {"username": "other-service"}),
    ]
    for command in asked:
        access.handle(command)
    access.group.settle()
    assert [answered.code for _, answered in access.connection.replies[-3:]] == [0, 0, 0]
    assert access.group.state.accounts[NAME] == AccountConfig(
        NAME, SECRET, admin=True, enabled=False
    )


@pytest.mark.parametrize(
    ("code", "ext", "content", "why"),
    [
        (CODE.AUTH_CREATE_USER, {"username": " "}, {"password": SECRET}, "username is blank"),
        (CODE.AUTH_CREATE_USER, {"username": " u "}, {"password": SECRET}, "no space at its ends"),
        (CODE.AUTH_CREATE_USER, {"username": NAME}, {}, "password is blank"),
        (CODE.AUTH_CREATE_USER, {"username": NAME}, {"password": "short"}, "at least 7"),
        (CODE.AUTH_UPDATE_USER, {"username": NAME}, {"password": SECRET}, "does not exist"),
        (CODE.AUTH_CREATE_ACL, {"subject": NAME}, {}, "is not User:NAME"),
        (CODE.AUTH_CREATE_ACL, {"subject": f"User:{NAME}"}, {"subject": "User:x"}, "different"),
        (CODE.AUTH_GET_ACL, {"subject": f"User:{NAME}"}, {}, "does not exist"),
        (CODE.AUTH_DELETE_ACL, {"subject": f"User:{NAME}"}, {}, "does not exist"),
        (CODE.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": NAME}, {}, "needs a secretKey"),
        (CODE.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "all"}, {}, "not an addr"),
        (CODE.AUTH_CREATE_USER, {"username": IN_FILE}, {"password": SECRET}, "in the file"),
        (CODE.AUTH_DELETE_USER, {"username": IN_FILE}, {}, "in the file"),
        (CODE.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": IN_FILE}, {}, "in the file"),
    ],
)
def test_what_cannot_be_is_refused_and_stores_nothing(
    access: Broker, code: RequestCode, ext: dict[str, str], content: dict[str, Any], why: str
) -> None:
    refused = access.call(code, ext, body(**content))
    assert refused.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.NO_PERMISSION)
    assert why in str(refused.remark)
    assert SECRET not in str(refused.remark)
    assert refused.ext[OUTCOME_FIELD] == "not_stored"
    assert access.group.state.access_counter == 0


def test_too_many_accounts_are_refused(access: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.processors.access.ACCOUNTS_MAX", 2)
    assert [create(access, f"service-{number}").code for number in range(2)] == [0, 0]
    full = create(access, "service-2")
    assert "2 accounts are there, at most 2" in str(full.remark)
    assert create(access, "service-1").code == 0, "one that is there is not refused"


# ------------------------------------------------------------------------------- no secret leaves


def positions(access: Broker) -> list[int]:
    units = access.group.queues.queue(STATE_TOPIC, ACCESS_QUEUE).read(0, 1)
    return [int(position) for position in units["phy_offset"]]


def test_no_request_reads_the_records_of_accounts(access: Broker) -> None:
    create(access)
    (position,) = positions(access)
    assert SECRET.encode() in bytes(access.group.log.record_at(position))
    access.make_group("g")
    pull = pulls.ext(topic=STATE_TOPIC, queueId=ACCESS_QUEUE)
    view = {"offset": str(position)}
    back = {"group": "g", "offset": str(position), "delayLevel": "0"}
    for code, ext in (
        (CODE.PULL_MESSAGE, pull),
        (CODE.LITE_PULL_MESSAGE, pull),
        (CODE.VIEW_MESSAGE_BY_ID, view),
        (CODE.CONSUMER_SEND_MSG_BACK, back),
    ):
        refused = access.call(code, ext)
        assert refused.code == ResponseCode.NO_PERMISSION, code
        assert SECRET.encode() not in bytes(refused.body)
    pop = pops.fields(topic=STATE_TOPIC, queueId=ACCESS_QUEUE)
    assert access.call(CODE.POP_MESSAGE, pop).code == ResponseCode.NO_PERMISSION
    any_queue = access.call(CODE.POP_MESSAGE, {**pop, "queueId": "-1"})
    assert any_queue.code == ResponseCode.NO_PERMISSION
    other = access.call(CODE.PULL_MESSAGE, {**pull, "queueId": "0"})
    assert other.code == 0, "the other queues of the state are readable"


def test_no_log_line_has_a_secret(access: Broker) -> None:
    with structlog.testing.capture_logs() as lines:
        create(access)
        config = {"accessKey": "other-service", "secretKey": SECRET}
        access.call(CODE.UPDATE_AND_CREATE_ACL_CONFIG, config)
        access.call(CODE.AUTH_CREATE_USER, {"username": NAME}, body(password=SECRET + "x"))
    assert [line["subject"] for line in lines if line["event"] == "audit"] == [
        f"username={NAME}",
        "accessKey=other-service",
        f"username={NAME}",
    ]
    assert SECRET not in str(lines)


# ------------------------------------------------------------------------------- on a follower


@pytest.fixture
def follower(access: Broker) -> Broker:
    create(access)
    access.group.step_down("10.0.0.2:10911")
    return access


async def asked_of(broker: Broker, command: RemotingCommand) -> RemotingCommand:
    handled = broker.handle(command)
    if not isinstance(handled, RemotingCommand):
        handled = await handled
    return cast("RemotingCommand", handled)


async def test_a_follower_passes_a_change_on_unchanged(follower: Broker, leader: Leader) -> None:
    command = request(CODE.AUTH_UPDATE_USER, {"username": NAME}, body(userType="Super"))
    Credentials("operator", "0123456789").sign(command)
    fields = dict(command.ext)
    answered = await asked_of(follower, command)
    assert (answered.code, answered.remark) == (0, "as the leader answers")
    ((address, passed),) = leader.asked
    assert address == follower.group.leader_address
    assert (passed.code, dict(passed.ext), passed.body) == (command.code, fields, command.body)


async def test_a_follower_gives_the_refusal_of_the_leader(follower: Broker, leader: Leader) -> None:
    leader.code = ResponseCode.NO_PERMISSION
    answered = await asked_of(follower, request(CODE.AUTH_DELETE_USER, {"username": NAME}))
    assert answered.code == ResponseCode.NO_PERMISSION


async def test_what_was_passed_on_is_not_passed_on_again(follower: Broker, leader: Leader) -> None:
    command = request(CODE.AUTH_DELETE_USER, {"username": NAME})
    command.remark = PASSED_ON
    answered = await asked_of(follower, command)
    assert answered.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert leader.asked == []


async def test_what_is_signed_for_a_connection_is_not_passed_on(
    follower: Broker, leader: Leader
) -> None:
    """The leader could not check it: it would refuse what it takes from the SDK itself."""
    command = request(CODE.AUTH_DELETE_USER, {"username": NAME})
    Credentials("operator", "0123456789").sign(command)
    command.ext[FORM] = FRESH_FORM
    answered = await asked_of(follower, command)
    assert answered.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert answered.ext["leaderAddr"] == follower.group.leader_address
    assert leader.asked == []


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (ConnectFailedError("refused"), ResponseCode.SERVICE_NOT_AVAILABLE, "not_stored"),
        (RequestTimedOutError("late"), ResponseCode.SYSTEM_ERROR, "unknown"),
    ],
)
async def test_a_leader_without_an_answer_leaves_two_outcomes(
    follower: Broker, leader: Leader, error: Exception, code: ResponseCode, outcome: str
) -> None:
    leader.error = error
    answered = await asked_of(follower, request(CODE.AUTH_DELETE_USER, {"username": NAME}))
    assert (answered.code, answered.ext[OUTCOME_FIELD]) == (code, outcome)


def test_a_follower_shows_what_it_has_applied(follower: Broker) -> None:
    shown = follower.call(CODE.AUTH_GET_USER, {"username": NAME})
    assert json.loads(bytes(shown.body))["username"] == NAME
