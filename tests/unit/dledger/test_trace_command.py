"""The path of a message as `dledger msg trace` shows it."""

from __future__ import annotations

from dledger.cli.trace_command import path_rows
from dledger.client.trace import TraceBean, TraceContext, TraceType

ID = "0A0000010001"
BEAN = TraceBean(ID, "T", keys="k1 k2", store_host="10.0.0.1:10911")
TRACED = [
    TraceContext(TraceType.SUB_AFTER, 2900, (BEAN,), group_name="c", cost_time_ms=900,
                 is_success=False, request_id="R1", context_code=4),
    TraceContext(TraceType.SUB_BEFORE, 2000, (TraceBean(ID, keys="k1 k2"),), group_name="c",
                 request_id="R1"),
    TraceContext(TraceType.SUB_BEFORE, 9000, (TraceBean(ID, retry_times=1),), group_name="c",
                 request_id="R2"),
    TraceContext(TraceType.PUB, 1000, (BEAN,), group_name="p", cost_time_ms=3),
    TraceContext(TraceType.PUB, 1000, (TraceBean("OTHER", "T"),), group_name="p"),
]  # fmt: skip


def test_steps_are_joined_and_stand_in_order_of_time() -> None:
    rows = path_rows(TRACED, ID)
    assert [(r["step"], r["topic"], r["took_ms"], r["try"], r["result"]) for r in rows] == [
        ("send", "T", 3, None, "stored"),
        ("consume", "T", 900, 1, "failed"),
        ("consume", "T", None, 2, "no end is known"),
    ]
    assert rows[0]["time"] == "1970-01-01T00:00:01.000+00:00"
    assert rows[0]["where"] == "10.0.0.1:10911"


def test_a_key_finds_them_too() -> None:
    assert [row["step"] for row in path_rows(TRACED, "k2")] == ["send", "consume"]
    assert path_rows(TRACED, "k3") == []


def test_an_end_without_a_beginning_is_shown() -> None:
    (row,) = path_rows(TRACED[:1], ID)
    assert (row["step"], row["result"], row["time"][17:23]) == ("consume", "failed", "02.900")
