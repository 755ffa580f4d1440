import pytest

from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.message_id import (
    UniqKeyFactory,
    decode_offset_message_id,
    encode_offset_message_id,
)
from dledger.commitlog.record import pack_host

NOVEMBER_2026_MS = 1_793_491_200_000


def test_an_offset_message_id_is_host_port_and_offset_in_hex() -> None:
    message_id = encode_offset_message_id(pack_host("127.0.0.1", 10911), 1024)
    assert message_id == "7F000001" + "00002A9F" + "0000000000000400"
    assert decode_offset_message_id(message_id) == ("127.0.0.1", 10911, 1024)


@pytest.mark.parametrize("bad", ["", "xyz", "7F000001", "7F" * 17])
def test_another_string_is_refused(bad: str) -> None:
    with pytest.raises(LocalProtocolError, match="is not a message id"):
        decode_offset_message_id(bad)


def test_a_uniq_key_holds_address_process_salt_time_and_counter() -> None:
    factory = UniqKeyFactory(bytes([10, 0, 0, 1]), 0x12345, 0xCAFEBABE)
    now_ms = NOVEMBER_2026_MS + 0x1234
    assert factory.create(now_ms) == "0A000001" + "2345" + "CAFEBABE" + "00001234" + "0000"
    assert factory.create(now_ms) == "0A000001" + "2345" + "CAFEBABE" + "00001234" + "0001"


def test_uniq_key_time_follows_month_and_clock() -> None:
    factory = UniqKeyFactory(bytes(4), 0, 0)
    day_ms = 86_400_000
    times = [
        NOVEMBER_2026_MS + 30 * day_ms + 5,
        NOVEMBER_2026_MS + 61 * day_ms + 6,
        NOVEMBER_2026_MS,
    ]
    assert [factory.create(now_ms)[20:28] for now_ms in times] == [
        "00000005",
        "00000006",
        "00000000",
    ]


def test_65536_keys_of_one_millisecond_differ() -> None:
    factory = UniqKeyFactory(bytes(4), 0, 0)
    assert len({factory.create(NOVEMBER_2026_MS) for _ in range(65_536)}) == 65_536
