"""Message identifiers: where a message lies, and which message it is.

The *offset message id* names a broker and a byte of its log; the *UNIQ_KEY* is made by the
client before sending and stays with the message. Both are upper-case hex.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.record import IPV4_HOST_BYTES, IPV6_HOST_BYTES, unpack_host

_PHY_OFFSET_BYTES: Final = 8
_COUNTER_MASK: Final = 0xFFFF


def encode_offset_message_id(store_host: bytes, phy_offset: int) -> str:
    """Return the offset message id: 32 characters for an IPv4 broker, 56 for IPv6."""
    return (store_host + phy_offset.to_bytes(_PHY_OFFSET_BYTES, "big", signed=True)).hex().upper()


def decode_offset_message_id(message_id: str) -> tuple[str, int, int]:
    """Return host, port and physical offset of an offset message id.

    Raises LocalProtocolError: not one; a UNIQ_KEY has the same length and cannot be distinguished.
    """
    try:
        raw = bytes.fromhex(message_id)
    except ValueError as error:
        raise LocalProtocolError(f"{message_id!r} is not a message id: not hex") from error
    if len(raw) - _PHY_OFFSET_BYTES not in (IPV4_HOST_BYTES, IPV6_HOST_BYTES):
        raise LocalProtocolError(f"{message_id!r} is not a message id: 32 or 56 characters")
    host, port = unpack_host(raw[:-_PHY_OFFSET_BYTES])
    return host, port, int.from_bytes(raw[-_PHY_OFFSET_BYTES:], "big", signed=True)


class UniqKeyFactory:
    """Makes UNIQ_KEYs: address · process id · salt · ms since the month began · counter.

    Two factories never meet while address, process id or salt differ; one factory makes up to
    65,536 different keys a millisecond. RocketMQ counts months in local time, we in UTC.

    Args:
        ip: 4 or 16 bytes.
        pid: Process id; the lower 16 bits count.
        salt: 32 bits that tell factories of one process apart.
    """

    def __init__(self, ip: bytes, pid: int, salt: int) -> None:
        if len(ip) not in (IPV4_HOST_BYTES - 4, IPV6_HOST_BYTES - 4):
            raise LocalProtocolError(f"an IP address has 4 or 16 bytes, not {len(ip)}")
        self._prefix = f"{ip.hex()}{pid & 0xFFFF:04x}{salt & 0xFFFFFFFF:08x}".upper()
        self._counter = 0
        self._last_ms = -1
        self._stamped = ""
        self._month_begin_ms = 0
        self._month_end_ms = 0

    def create(self, now_ms: int) -> str:
        """Return the next key: 32 characters (56 for IPv6)."""
        if now_ms != self._last_ms:
            if not self._month_begin_ms <= now_ms < self._month_end_ms:
                self._month_begin_ms, self._month_end_ms = _month_of(now_ms)
            self._last_ms = now_ms
            self._stamped = f"{self._prefix}{now_ms - self._month_begin_ms:08X}"
        counter = self._counter
        self._counter = (counter + 1) & _COUNTER_MASK
        return f"{self._stamped}{counter:04X}"


def _month_of(now_ms: int) -> tuple[int, int]:
    begin = datetime.fromtimestamp(now_ms // 1000, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    if begin.month == 12:
        end = begin.replace(year=begin.year + 1, month=1)
    else:
        end = begin.replace(month=begin.month + 1)
    return int(begin.timestamp()) * 1000, int(end.timestamp()) * 1000
