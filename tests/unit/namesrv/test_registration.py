"""The body of a registration in both forms, and everything that can be wrong with it."""

import json
import struct
import zlib

import pytest

from dledger.namesrv import registration
from dledger.namesrv.errors import BadRegisterBodyError
from dledger.namesrv.registration import decode_register_body
from tests.harness.registrations import encode_compressed
from tests.unit.namesrv.world import register_body as sample


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def plain_compressed(*, mapping: bytes = b"") -> bytes:
    """Return the compressed form before compression, built by hand from the format's page."""
    version = b'{"counter":7,"stateVersion":3,"timestamp":1600000000000}'
    topics = [b"T1 4 8 6 SINGLE_TAG", b'T2 1 1 4 MULTI_TAG {"message.type":"FIFO"}']
    return b"".join(
        [
            sized(version),
            struct.pack(">i", len(topics)),
            *map(sized, topics),
            sized(b'["10.0.0.1:40000"]'),
            mapping,
        ]
    )


@pytest.mark.parametrize("mapping", [b"", struct.pack(">i", 0), struct.pack(">i", 1) + b"??"])
def test_compressed_body_is_read_by_its_format(mapping: bytes) -> None:
    data = zlib.compress(plain_compressed(mapping=mapping))
    body = decode_register_body(data, compressed=True, crc=zlib.crc32(data) & 0x7FFFFFFF)
    wrapper = body.topic_config_serialize_wrapper
    assert (wrapper.data_version.counter, wrapper.data_version.state_version) == (7, 3)
    first, second = wrapper.topic_config_table["T1"], wrapper.topic_config_table["T2"]
    assert (first.read_queue_nums, first.write_queue_nums, first.perm) == (4, 8, 6)
    assert (second.topic_filter_type, second.attributes) == ("MULTI_TAG", {"message.type": "FIFO"})
    assert body.filter_server_list == ["10.0.0.1:40000"]


def test_both_forms_say_the_same() -> None:
    body = sample(["T1", "T2"], counter=5, filters=["f:1"])
    plain = decode_register_body(body.encode(), compressed=False, crc=0)
    assert decode_register_body(encode_compressed(body), compressed=True, crc=0) == plain == body


def test_a_java_broker_s_json_is_read() -> None:
    data = json.dumps(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": {"counter": 1, "timestamp": 2},
                "topicConfigTable": {
                    "T1": {
                        "order": False,
                        "perm": 6,
                        "readQueueNums": 16,
                        "topicFilterType": "SINGLE_TAG",
                        "topicName": "T1",
                        "topicSysFlag": 1,
                        "writeQueueNums": 16,
                    }
                },
            },
        }
    ).encode()
    body = decode_register_body(data, compressed=False, crc=0)
    assert body.topic_config_serialize_wrapper.topic_config_table["T1"].topic_sys_flag == 1
    assert body.topic_config_serialize_wrapper.data_version.state_version == 0


def test_an_empty_body_is_a_broker_without_topics() -> None:
    body = decode_register_body(b"", compressed=False, crc=0)
    assert body.topic_config_serialize_wrapper.topic_config_table == {}


def test_another_checksum_is_refused_in_rocketmq_s_words() -> None:
    with pytest.raises(BadRegisterBodyError, match=r"^crc32 not match$"):
        decode_register_body(b"{}", compressed=False, crc=1)


GOOD = plain_compressed()


@pytest.mark.parametrize(
    "data",
    [
        b"not zlib",
        zlib.compress(GOOD)[:-8],
        zlib.compress(GOOD[:20]),
        zlib.compress(GOOD[:-3]),
        zlib.compress(b"\xff\xff\xff\xff" + GOOD[4:]),
        zlib.compress(GOOD.replace(b"T1 4 8 6 SINGLE_TAG", b"T1 4 8 six SINGLE_T")),
        zlib.compress(GOOD.replace(b"T1 4 8 6 SINGLE_TAG", b"T1_4_8_6_SINGLE_TAG")),
        zlib.compress(GOOD.replace(b'["10.0.0.1:40000"]', b'["10.0.0.1:40000"?')),
    ],
)
def test_a_damaged_compressed_body_is_refused(data: bytes) -> None:
    with pytest.raises(BadRegisterBodyError, match="registration cannot be read"):
        decode_register_body(data, compressed=True, crc=0)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"topicConfigSerializeWrapper":7}', b"\xff"])
def test_damaged_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRegisterBodyError, match="registration cannot be read"):
        decode_register_body(data, compressed=False, crc=0)


def test_a_body_that_inflates_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "MAX_INFLATED_BYTES", 10_000)
    with pytest.raises(BadRegisterBodyError, match="more than 10000 bytes"):
        decode_register_body(zlib.compress(b"\0" * 1_000_000), compressed=True, crc=0)
