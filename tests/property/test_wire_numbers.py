"""Numbers that others wrote are ASCII digits and perhaps a sign, wherever they are read."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.broker_errors import PropertyUnreadableError
from dledger.commitlog.properties import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_DELAY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
)
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import RecallHandle, SendMessageHeader
from dledger.remoting.protocol.own_fields import shown_token
from dledger.remoting.protocol.pop_requests import PollingInfoHeader, decode_start_offsets
from dledger.remoting.protocol.receipt_handle import ReceiptHandle
from dledger.services.delayed_message import delay_level_of, deliver_at_ms
from dledger.services.half_message import half_properties

SENT: Final = dict.fromkeys("defgh", "1") | dict.fromkeys("abc", "T")


def of_property(name: str, read: Callable[[bytes], object]) -> tuple[str, Callable[[str], object]]:
    return name, lambda text: read(f"{name}\x01{text}\x02".encode())


READERS: Final[dict[str, Callable[[str], object]]] = {
    "field": lambda text: PollingInfoHeader.decode(
        {"consumerGroup": "g", "topic": "T", "queueId": text}
    ),
    "letters": lambda text: SendMessageHeader.of(
        request(RequestCode.SEND_MESSAGE_V2, SENT | {"e": text})
    ),
    "retries": lambda text: SendMessageHeader.of(
        request(RequestCode.SEND_MESSAGE_V2, SENT | {"j": text})
    ),
    "receipt": lambda text: ReceiptHandle.decode(f"0 0 0 {text} 0 b 0 0"),
    "recall": lambda text: RecallHandle.decode(
        urlsafe_b64encode(f"v1 T b {text} K".encode()).decode()
    ),
    "offsets": lambda text: decode_start_offsets(f"0 {text} 1"),
    "token": lambda text: shown_token({"lockToken": text}),
    **dict(
        [
            of_property(PROPERTY_DELAY, lambda raw: delay_level_of(raw, 18)),
            of_property(PROPERTY_TIMER_DELAY_SEC, lambda raw: deliver_at_ms(raw, 0)),
            of_property(PROPERTY_TIMER_DELAY_MS, lambda raw: deliver_at_ms(raw, 0)),
            of_property(
                PROPERTY_TIMER_DELIVER_MS,
                lambda raw: deliver_at_ms(b"TIMER_DELAY_SEC\x011\x02" + raw, 0),
            ),
            of_property(
                PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
                lambda raw: half_properties(raw, "g", "T", 0),
            ),
        ]
    ),
}
TEXTS: Final = st.from_regex("[+-]?[0-9]{1,6}", fullmatch=True) | st.text(
    "0123456789+-_ \n.ex\u0661\u0967\uff11\u00b2", min_size=1, max_size=4
)


@pytest.mark.parametrize("name", READERS)
@given(TEXTS)
def test_numbers_of_others_are_ascii_digits(name: str, text: str) -> None:
    digits = text[1:] if text[0] in "+-" else text
    is_number = digits != "" and set(digits) <= set("0123456789")
    try:
        READERS[name](text)
    except (BadRequestError, PropertyUnreadableError):
        assert not is_number
    else:
        assert is_number
