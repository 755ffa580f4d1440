"""Hypothesis strategies for records, batches and entries."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from dledger.commitlog.entry import RecordBatch, Run, seal_entry
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import encode_record

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)

_NO_SURROGATES: tuple[Literal["Cs"]] = ("Cs",)
_text = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=_NO_SURROGATES),
    min_size=1,
    max_size=8,
)

topics = st.one_of(
    st.sampled_from(
        ["T1", "T2", "SCHEDULE_TOPIC_XXXX", "%RETRY%group", "längeres-thema", "x" * 127]
    ),
    st.sampled_from(["y" * 128, "z" * 300]),
    _text,
)
"""Short and long (version 2) names, ASCII and not, and the one with delivery times."""

tags = st.one_of(st.sampled_from(["TagA", "TagB"]), _text)
uniq_keys = st.one_of(
    st.text("0123456789ABCDEF", min_size=32, max_size=32),
    st.text("0123456789ABCDEF", min_size=56, max_size=56),
    _text,
)
keys = st.lists(st.one_of(st.sampled_from(["order1", "ключ"]), _text), min_size=1, max_size=3).map(
    " ".join
)


@st.composite
def property_maps(draw: st.DrawFn) -> dict[str, str]:
    """Properties in any order, the indexed ones often among them."""
    found: dict[str, str] = {}
    for name, values in draw(
        st.permutations([("UNIQ_KEY", uniq_keys), ("TAGS", tags), ("KEYS", keys), ("X", _text)])
    ):
        if draw(st.booleans()):
            found[name] = draw(values)
    found |= draw(st.dictionaries(_text, _text, max_size=2))
    return found


@st.composite
def raw_properties(draw: st.DrawFn) -> bytes:
    """Encoded properties as brokers meet them: duplicates, empty values, cut ends, bad UTF-8."""
    raw = encode_properties(draw(property_maps()))
    shape = draw(st.sampled_from(["as is", "as is", "no end", "twice", "odd"]))
    if shape == "no end":
        return raw.removesuffix(b"\x02")
    if shape == "twice":
        return raw + encode_properties(draw(property_maps()))
    if shape == "odd":
        piece = st.sampled_from(
            [
                b"TAGS\x01", b"KEYS\x01", b"UNIQ_KEY\x01", b"\x02", b"\x01", b"TA", b"GS\x01", b"a",
                b"\xff", b"A" * 32,
            ]
        )  # fmt: skip
        return raw + b"".join(draw(st.lists(piece, max_size=6)))
    return raw


ipv4_hosts = st.binary(min_size=8, max_size=8)
hosts = st.one_of(ipv4_hosts, st.binary(min_size=20, max_size=20))

record_arguments = st.fixed_dictionaries(
    {
        "topic": topics,
        "queue_id": st.one_of(st.integers(0, 3), I32),
        "body": st.binary(max_size=20),
        "properties": raw_properties(),
        "flag": I32,
        "sys_flag": st.sampled_from([0, 0, 0, 1, 2, 4, 8, 12, 0x301]),
        "born_timestamp_ms": I64, "born_host": hosts, "reconsume_times": I32,
        "prepared_transaction_offset": I64, "queue_offset": I64, "phy_offset": I64,
        "store_timestamp_ms": I64,
    }
)  # fmt: skip
"""Arguments of `encode_record` but the store host, which an entry's records must share in width."""


@dataclass(frozen=True)
class SealedEntry:
    """An entry and what it was made from."""

    frame: bytearray
    prev_chain: int
    records: list[dict[str, Any]]


def batch_of(arguments: list[dict[str, Any]], born_host: bytes | None = None) -> RecordBatch:
    """Return one batch with one run for each stretch of equal topic and queue."""
    records = [encode_record(**one) for one in arguments]
    runs: list[Run] = []
    for one in arguments:
        topic, queue_id = one["topic"], one["queue_id"]
        if runs and (runs[-1].topic, runs[-1].queue_id) == (topic, queue_id):
            runs[-1] = Run(topic, queue_id, runs[-1].count + 1)
        else:
            runs.append(Run(topic, queue_id, 1))
    sizes = np.array([len(record) for record in records], np.uint32)
    return RecordBatch(b"".join(records), sizes, tuple(runs), born_host)


@st.composite
def sealed_entries(draw: st.DrawFn, max_records: int = 40) -> SealedEntry:
    """Entries of one batch over everything a record may be."""
    store_host = draw(hosts)
    kinds = draw(st.lists(record_arguments, min_size=1, max_size=6))
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=max_records))
    records = [kinds[pick] | {"store_host": store_host} for pick in picks]
    batch = batch_of(records)
    prev_chain = draw(st.integers(0, 2**64 - 1))
    frame = seal_entry(
        [batch],
        draw(st.lists(st.integers(0, 2**40), min_size=len(batch.runs), max_size=len(batch.runs))),
        index=draw(st.integers(1, 2**40)),
        term=draw(st.integers(0, 2**40)),
        position=draw(st.integers(0, 2**40)),
        prev_chain=prev_chain,
        store_time_ms=draw(st.integers(0, 2**42)),
        store_host=store_host,
    )
    return SealedEntry(frame, prev_chain, records)


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """*data* with bytes changed, cut off or put in."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not mutated:
            break
        at = draw(st.integers(0, len(mutated) - 1))
        match draw(st.sampled_from(["set", "set", "set", "cut", "insert"])):
            case "set":
                mutated[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, mutated[at] ^ 1]))
            case "cut":
                del mutated[at:]
            case "insert":
                mutated[at:at] = draw(st.binary(min_size=1, max_size=4))
    return bytes(mutated)
