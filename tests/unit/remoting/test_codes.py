"""The code tables."""

from __future__ import annotations

from dledger.remoting.protocol.codes import OWN_CODES, RequestCode, ResponseCode


def test_codes_are_those_of_rocketmq() -> None:
    known = {
        10: "SEND_MESSAGE",
        11: "PULL_MESSAGE",
        34: "HEART_BEAT",
        103: "REGISTER_BROKER",
        105: "GET_ROUTEINFO_BY_TOPIC",
        215: "DELETE_TOPIC_IN_BROKER",
        310: "SEND_MESSAGE_V2",
        320: "SEND_BATCH_MESSAGE",
        361: "LITE_PULL_MESSAGE",
        370: "RECALL_MESSAGE",
        904: "BROKER_HEARTBEAT",
        1013: "CONTROLLER_APPLY_BROKER_ID",
        3010: "AUTH_LIST_ACL",
        200151: "BATCH_ACK_MESSAGE",
    }
    assert {code: RequestCode(code).name for code in known} == known
    assert len(RequestCode) > 130
    assert (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.INVALID_PARAMETER) == (14, 29)


def test_our_own_codes_stay_in_their_range() -> None:
    ours = {code for code in RequestCode if code in OWN_CODES}
    assert {code.name for code in ours} >= {"CAPABILITIES", "SEND_RECORDS", "RAFT_STATUS"}
    rocketmqs = {5001, 5002, 5003}  # timer engine and lists of topics and groups, since 5.2
    assert {code for code in RequestCode if 3010 < code < 200_000} - ours == rocketmqs
