"""Commands, frames and what can happen to their bytes."""

import itertools
from typing import Any

from hypothesis import strategies as st

from dledger.remoting.protocol.command import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    RemotingCommand,
    SerializeType,
)
from dledger.remoting.protocol.headers import SendMessageHeader

I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
I16 = st.integers(-(1 << 15), (1 << 15) - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NAMES = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ_0129", min_size=1, max_size=12)
STRING_EXT = st.dictionaries(TEXT, TEXT, max_size=6)
PLAIN_VALUES = TEXT | I64 | st.booleans() | st.binary(max_size=20)
CBOR_EXT = st.dictionaries(
    TEXT, PLAIN_VALUES | st.lists(PLAIN_VALUES | st.lists(I64, max_size=3), max_size=4), max_size=6
)
LANGUAGES = st.sampled_from(["JAVA", "CPP", "PYTHON", "GO", "OTHER"])


@st.composite
def commands(draw: st.DrawFn, serialize: SerializeType | None = None) -> RemotingCommand:
    """Any command that its header encoding can carry without loss."""
    kind = serialize if serialize is not None else draw(st.sampled_from(SerializeType))
    binary = kind is SerializeType.ROCKETMQ
    remark: Any = draw(st.none() | TEXT.filter(bool))
    ext: Any = draw(CBOR_EXT if kind is SerializeType.CBOR else STRING_EXT)
    return RemotingCommand(
        draw(I16 if binary else I32),
        draw(I32),
        draw(st.sampled_from([0, FLAG_RESPONSE, FLAG_ONEWAY])),
        remark,
        ext,
        draw(st.binary(max_size=200)),
        draw(LANGUAGES),
        draw(I16 if binary else I32),
        kind,
    )


def cuts(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """The same bytes in pieces, cut anywhere."""
    positions = st.lists(st.integers(0, len(data)), max_size=12).map(sorted)

    def pieces(at: list[int]) -> list[bytes]:
        edges = [0, *at, len(data)]
        return [data[a:b] for a, b in itertools.pairwise(edges)]

    return positions.map(pieces)


SEND_HEADERS = st.builds(
    SendMessageHeader,
    producer_group=TEXT,
    topic=TEXT,
    default_topic=TEXT,
    default_topic_queue_nums=I32,
    queue_id=I32,
    sys_flag=I32,
    born_timestamp=I64,
    flag=I32,
    properties=st.none() | TEXT,
    reconsume_times=st.none() | I32,
    unit_mode=st.none() | st.booleans(),
    max_reconsume_times=st.none() | I32,
    batch=st.none() | st.booleans(),
    bname=st.none() | TEXT,
)

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
