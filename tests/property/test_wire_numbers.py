"""Numbers that others wrote are ASCII digits and perhaps a sign, wherever they are read."""

from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.broker_errors import PropertyUnreadableError
from dledger.cli.message_command import time_ms
from dledger.cli.topic_command import duration_ms
from dledger.commitlog.errors import MQError
from dledger.console.topics_page import retention_ms
from dledger.remoting.access.accounts import WhiteAddresses
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
from dledger.settings.config import SETTINGS
from dledger.settings.text import parse_delay_levels, parse_hours, parse_peers
from dledger.spark_jobs.datasource.options import count_of

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


ENTERED: Final[tuple[Callable[[str], object], ...]] = (
    parse_hours,
    SETTINGS["server.listen_port"].parse,
    SETTINGS["store.disk_max_used_space_ratio"].parse,
    lambda text: parse_delay_levels(f"{text}s"),
    lambda text: parse_peers(f"n0-h:{text}"),
    lambda text: WhiteAddresses(f"10.0.0.{text}-{text}"),
    lambda text: duration_ms(f"{text}d"),
    lambda text: time_ms(text, "--from", 0),
    lambda text: retention_ms({"retention_hours": text}),
    lambda text: count_of({"timeout": text}, "timeout", 1),
)
"""Numbers in settings, forms, options of commands and of Spark."""


@pytest.mark.parametrize("read", ENTERED, ids=range(len(ENTERED)))
def test_numbers_of_operators_are_ascii_digits(read: Callable[[str], object]) -> None:
    read("17")
    for text in ("1_0", "1e1", "\u0661", "\u00b2", "7" * 5_000):
        with pytest.raises((ValueError, MQError)) as refused:
            read(text)
        assert "integer string conversion" not in str(refused.value)
