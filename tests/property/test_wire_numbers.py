"""Numbers that others wrote are ASCII digits and perhaps a sign, wherever they are read."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.broker_errors import PropertyUnreadableError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import RecallHandle, SendMessageHeader
from dledger.remoting.protocol.own_fields import shown_token
from dledger.remoting.protocol.pop_requests import (
    PollingInfoHeader,
    ReceiptHandle,
    decode_start_offsets,
)
from dledger.services.delayed_message import delay_level_of, deliver_at_ms
from dledger.services.half_message import half_properties

SENT: Final = dict.fromkeys("defgh", "1") | dict.fromkeys("abc", "T")


READERS: Final[dict[str, Callable[[str], object]]] = {
    "field": lambda text: PollingInfoHeader.decode(
        {"consumerGroup": "g", "topic": "T", "queueId": text}
    ),
    "letter": lambda text: SendMessageHeader.of(request(310, SENT | {"e": text})),
    "retries": lambda text: SendMessageHeader.of(request(310, SENT | {"j": text})),
    "receipt": lambda text: ReceiptHandle.decode(f"0 0 0 {text} 0 b 0 0"),
    "recall": lambda text: RecallHandle.decode(
        urlsafe_b64encode(f"v1 T b {text} K".encode()).decode()
    ),
    "offsets": lambda text: decode_start_offsets(f"0 {text} 1"),
    "token": lambda text: shown_token({"lockToken": text}),
    "level": lambda text: delay_level_of(f"DELAY\x01{text}\x02".encode(), 18),
    "seconds": lambda text: deliver_at_ms(f"TIMER_DELAY_SEC\x01{text}\x02".encode(), 0),
    "delay": lambda text: deliver_at_ms(f"TIMER_DELAY_MS\x01{text}\x02".encode(), 0),
    "time": lambda text: deliver_at_ms(
        f"TIMER_DELAY_SEC\x011\x02TIMER_DELIVER_MS\x01{text}\x02".encode(), 0
    ),
    "immunity": lambda text: half_properties(
        f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{text}\x02".encode(), "g", "T", 0
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
