"""Messages of the gRPC protocol into those of the SDK, and back; its interface file."""

import gzip
from pathlib import Path
from typing import Any

import grpc_tools
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_tools import protoc

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import MAX_BODY_BYTES, encode_message_properties
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.properties import (
    MAX_CLIENT_PROPERTIES_BYTES,
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_SHARDING_KEY,
)
from dledger.commitlog.record import encode_record, pack_host
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.messages import (
    GZIP_MEMBERS_MAX,
    full_name,
    kind_sent,
    received_message,
    sent_message,
    timestamp,
)
from dledger.proxy.sends import is_too_far
from dledger.proxy.status import RefusedError
from tests.harness.shipped_files import ROOT

MD5_OF_ONE = "F97C5D29941BFB1B2FDAB0874906AB82"
AT_MS = 1_700_000_000_250


def message(body: bytes = b"one", user: dict[str, str] | None = None, **system: Any) -> pb.Message:
    given = {"message_id": "01AB", "message_type": pb.NORMAL, "body_encoding": pb.IDENTITY}
    return pb.Message(
        topic=pb.Resource(name="Orders"),
        user_properties=user or {},
        system_properties=pb.SystemProperties(**{**given, **system}),
        body=body,
    )


def stored(sent: pb.Message) -> MessageExt:
    """Return what a broker has of a message."""
    made = sent_message(sent)
    record = encode_record(
        topic=made.topic.encode(),
        queue_id=2,
        body=made.body,
        properties=encode_message_properties(made, made.message_id),
        born_timestamp_ms=AT_MS,
        born_host=pack_host("10.0.0.1", 4711),
        store_timestamp_ms=AT_MS + 5,
        store_host=pack_host("10.0.0.2", 10911),
        queue_offset=7,
    )
    return MessageExt(memoryview(record), 0, "broker-a")


def test_message_comes_back_as_it_was_sent() -> None:
    sent = message(
        user={"color": "red"},
        message_type=pb.FIFO,
        tag="new",
        keys=["k1", "k2"],
        message_group="g",
        trace_context="00-11",
    )
    got = received_message(
        stored(sent), pb.Resource(name="Orders"), receipt="a receipt", invisible_ms=1500
    )
    system = got.system_properties
    assert (got.body, dict(got.user_properties)) == (b"one", {"color": "red"})
    assert (system.message_id, system.tag, list(system.keys)) == ("01AB", "new", ["k1", "k2"])
    assert (system.message_type, system.message_group) == (pb.FIFO, "g")
    assert system.trace_context == "00-11"
    assert (system.born_timestamp, system.born_host) == (timestamp(AT_MS), "10.0.0.1:4711")
    assert (system.store_timestamp, system.store_host) == (timestamp(AT_MS + 5), "10.0.0.2:10911")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (2, 7, 1)
    assert (system.receipt_handle, system.invisible_duration.nanos) == ("a receipt", 500_000_000)
    assert system.body_digest == pb.Digest(type=pb.MD5, checksum=MD5_OF_ONE)


def test_attempts_beyond_the_protocol_stay_readable() -> None:
    record = encode_record(
        topic=b"Orders", queue_id=0, body=b"x", properties=b"", reconsume_times=2**31 - 1
    )
    found = received_message(MessageExt(memoryview(record), 0, "b"), pb.Resource(name="Orders"))
    assert found.system_properties.delivery_attempt == 2**31 - 1


@pytest.mark.parametrize(
    ("given", "found"),
    [("till-7", "till-7"), ("", "10.0.0.1:4711"), (" ", "10.0.0.1:4711"), ("a\x01b", "a b")],
    ids=["named", "none", "blank", "separators"],
)
def test_born_host_is_the_one_that_a_client_names(given: str, found: str) -> None:
    # The connection that a broker sees is the proxy's.
    got = received_message(stored(message(born_host=given)), pb.Resource(name="Orders"))
    assert got.system_properties.born_host == found
    assert dict(got.user_properties) == {}


def test_names_have_their_namespace() -> None:
    assert full_name(pb.Resource(name="Orders")) == "Orders"
    assert full_name(pb.Resource(name="Orders", resource_namespace="shop")) == "shop%Orders"


def test_delivery_time_is_kept_in_milliseconds() -> None:
    sent = message(message_type=pb.DELAY, delivery_timestamp=timestamp(AT_MS))
    assert sent_message(sent).deliver_at_ms == AT_MS
    got = received_message(stored(sent), sent.topic)
    assert got.system_properties.delivery_timestamp == timestamp(AT_MS)
    assert got.system_properties.message_type == pb.DELAY


def test_members_of_a_gzip_body_are_one_body() -> None:
    """A program that appends to a compressed file makes such a body; none of it may be lost."""
    first, empty, second = map(gzip.compress, (b"first ", b"", b"second"))
    for packed in (first + empty + second, empty + first + second + empty):
        assert sent_message(message(packed, body_encoding=pb.GZIP)).body == b"first second"


def test_members_of_a_gzip_body_are_bounded() -> None:
    """Each takes a copy of all behind it: a body of empty ones would stop the proxy for minutes."""
    first, empty = gzip.compress(b"all"), gzip.compress(b"")
    most = first + empty * (GZIP_MEMBERS_MAX - 1)
    assert sent_message(message(most, body_encoding=pb.GZIP)).body == b"all"
    with pytest.raises(RefusedError) as caught:
        sent_message(message(most + empty, body_encoding=pb.GZIP))
    assert caught.value.code == pb.MESSAGE_CORRUPTED


def test_empty_fields_are_as_if_left_out() -> None:
    """Some clients fill in every field, and RocketMQ takes that."""
    empty = message(tag="", keys=["", "k", ""], message_group="", trace_context="")
    plain = message(keys=["k"])
    assert sent_message(empty) == sent_message(plain)
    empty.system_properties.message_type = pb.MESSAGE_TYPE_UNSPECIFIED
    assert kind_sent(empty) == pb.NORMAL


@pytest.mark.parametrize(
    ("kind", "seconds", "kept"),
    [(pb.TRANSACTION, 0, "0"), (pb.TRANSACTION, 72 * 3600, "259200"), (pb.NORMAL, -1, None)],
)
def test_time_until_a_check_is_kept_of_transactions(
    kind: pb.MessageType, seconds: int, kept: str | None
) -> None:
    waits = Duration(seconds=seconds)
    sent = sent_message(message(message_type=kind, orphaned_transaction_recovery_duration=waits))
    assert (sent.properties or {}).get(PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS) == kept


@pytest.mark.parametrize("seconds", [-1, 72 * 3600 + 1, 1 << 62])
def test_time_until_a_check_has_bounds(seconds: int) -> None:
    waits = Duration(seconds=seconds)
    asked = message(message_type=pb.TRANSACTION, orphaned_transaction_recovery_duration=waits)
    with pytest.raises(RefusedError) as caught:
        sent_message(asked)
    assert caught.value.code == pb.BAD_REQUEST


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (message(b""), pb.MESSAGE_BODY_EMPTY),
        (message(b"x" * (MAX_BODY_BYTES + 1)), pb.MESSAGE_BODY_TOO_LARGE),
        (message(b"no gzip", body_encoding=pb.GZIP), pb.MESSAGE_CORRUPTED),
        (message(gzip.compress(b"x")[:-9], body_encoding=pb.GZIP), pb.MESSAGE_CORRUPTED),
        (
            message(gzip.compress(b"x" * (MAX_BODY_BYTES + 1)), body_encoding=pb.GZIP),
            pb.MESSAGE_BODY_TOO_LARGE,
        ),
        (message(gzip.compress(b"x") + b"tail", body_encoding=pb.GZIP), pb.MESSAGE_CORRUPTED),
        (
            message(
                gzip.compress(b"x" * MAX_BODY_BYTES) + gzip.compress(b"y"), body_encoding=pb.GZIP
            ),
            pb.MESSAGE_BODY_TOO_LARGE,
        ),
        (message(body_encoding=9), pb.UNSUPPORTED),
        (message(message_id=""), pb.ILLEGAL_MESSAGE_ID),
        (message(message_id=" "), pb.ILLEGAL_MESSAGE_ID),
        (message(message_type=pb.FIFO, message_group=""), pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(tag="a|b"), pb.ILLEGAL_MESSAGE_TAG),
        (message(keys=["a b"]), pb.ILLEGAL_MESSAGE_KEY),
        (message(user={"KEYS": "k"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(user={PROPERTY_SHARDING_KEY: "k"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(user={"__BORNHOST": "k"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(message_type=pb.FIFO), pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(message_type=pb.FIFO, message_group=" "), pb.ILLEGAL_MESSAGE_GROUP),
        (message(message_group="g"), pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(message_type=pb.DELAY), pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (
            message(message_type=pb.TRANSACTION, delivery_timestamp=timestamp(AT_MS)),
            pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (message(message_type=pb.LITE, lite_topic="l"), pb.ILLEGAL_LITE_TOPIC),
        (message(message_type=pb.PRIORITY, priority=1), pb.UNSUPPORTED),
    ],
    ids=map(str, range(23)),
)
def test_message_that_breaks_a_rule_is_refused(refused: pb.Message, code: pb.Code) -> None:
    with pytest.raises(RefusedError) as caught:
        sent_message(refused)
    assert caught.value.code == code
    assert caught.value.outcome == "not_stored"


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ({}, pb.NORMAL),
        ({"message_group": "g"}, pb.FIFO),
        ({"delivery_timestamp": timestamp(1)}, pb.DELAY),
    ],
)
def test_type_left_out_is_that_of_the_properties(system: dict[str, Any], kind: int) -> None:
    sent = message(message_type=pb.MESSAGE_TYPE_UNSPECIFIED, **system)
    assert kind_sent(sent) == kind


@pytest.mark.parametrize(
    "topic",
    ["", "a b", "x" * 128, "%DLQ%clerks", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"],
)
def test_topic_that_none_may_send_to_is_refused(topic: str) -> None:
    sent = message()
    sent.topic.name = topic
    with pytest.raises(RefusedError) as caught:
        sent_message(sent)
    assert caught.value.code == pb.ILLEGAL_TOPIC


@pytest.mark.parametrize(
    ("system", "code"),
    [
        ({"tag": "a\x01b"}, pb.ILLEGAL_MESSAGE_TAG),
        ({"tag": "a\x02b"}, pb.ILLEGAL_MESSAGE_TAG),
        ({"keys": ["k", "a\x01b"]}, pb.ILLEGAL_MESSAGE_KEY),
        ({"keys": ["a\x02b"]}, pb.ILLEGAL_MESSAGE_KEY),
        ({"keys": ["x" * 32_768]}, pb.MESSAGE_PROPERTIES_TOO_LARGE),
        (
            {"message_type": pb.DELAY, "delivery_timestamp": Timestamp(seconds=-1)},
            pb.ILLEGAL_DELIVERY_TIME,
        ),
        (
            {"message_type": pb.DELAY, "delivery_timestamp": Timestamp(seconds=1 << 62)},
            pb.ILLEGAL_DELIVERY_TIME,
        ),
    ],
)
def test_property_that_cannot_be_stored_is_refused(system: dict[str, Any], code: int) -> None:
    with pytest.raises(RefusedError) as caught:
        sent_message(message(**system))
    assert caught.value.code == code


def test_user_properties_are_bounded_in_bytes() -> None:
    with pytest.raises(RefusedError) as caught:
        sent_message(message(user={"a": "é" * (MAX_CLIENT_PROPERTIES_BYTES // 2)}))
    assert caught.value.code == pb.MESSAGE_PROPERTIES_TOO_LARGE
    assert sent_message(message(user={"a": "b" * (MAX_CLIENT_PROPERTIES_BYTES - 100)}))


def test_delay_that_is_too_long_is_a_delivery_time() -> None:
    remark = "a delay of 9000 ms, at most 8 s: timerMaxDelaySec"
    assert is_too_far(MessageIllegalError("", remark=remark))
    assert not is_too_far(MessageIllegalError("delays on g: too large", remark="too large"))
    assert not is_too_far(MessageIllegalError("no delay, nothing was sent"))


@pytest.mark.parametrize("bad", ["\x01", "a\x02"])
def test_what_no_property_holds_is_refused(bad: str) -> None:
    refused = [
        (message(message_id=bad), pb.ILLEGAL_MESSAGE_ID),
        (message(user={bad: "v"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(user={"k": bad}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(user={"": "v"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(user={"k": ""}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (message(message_type=pb.FIFO, message_group=bad), pb.ILLEGAL_MESSAGE_GROUP),
    ]
    for asked, code in refused:
        with pytest.raises(RefusedError) as caught:
            sent_message(asked)
        assert caught.value.code == code


SOURCE = "dledger/proxy/messaging.proto"
"""Calls of apache.rocketmq.v2.MessagingService."""
COMPILED = ROOT / "dledger/proxy/messaging.desc"
TYPES = "dledger/proxy/messaging_pb2.pyi"


def test_stored_protocol_is_what_the_file_makes(tmp_path: Path) -> None:
    known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{known}",
        f"--descriptor_set_out={tmp_path / COMPILED.name}",
        f"--pyi_out={tmp_path}",
        str(ROOT / SOURCE),
    ]
    assert protoc.main(arguments) == 0
    assert (tmp_path / COMPILED.name).read_bytes() == COMPILED.read_bytes(), "run make proto"
    assert (tmp_path / TYPES).read_text() == (ROOT / TYPES).read_text(), "run make proto"
