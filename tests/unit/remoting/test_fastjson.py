"""The JSON dialect of RocketMQ's bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol import fastjson
from dledger.remoting.protocol.bodies import MessageQueue
from dledger.remoting.protocol.fastjson import Dialect


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":1,"b":[true,false,null,-1e3]}', {"a": 1, "b": [True, False, None, -1000.0]}),
        ("{0:'x',1:\"y\"}", {"0": "x", "1": "y"}),
        ("{table:{a.b:1,$c:2,_d:3}}", {"table": {"a.b": 1, "$c": 2, "_d": 3}}),
        ('{{"b":2,"a":{"c":1}}:3}', {'{"a":{"c":1},"b":2}': 3}),
        ("[1L,2.5D,3F,4B,5S]", [1, 2.5, 3, 4, 5]),
        ("{,a:1,,b:[,1,,2,],}", {"a": 1, "b": [1, 2]}),
        (r"'\'\"\\\/\b\f\n\r\t\v\0é\x41\ud83d\ude00'", "'\"\\/\b\f\n\r\t\v\0éA😀"),
        ("  {a : 1 }\n", {"a": 1}),
        ("{a:NaN,b:undefined}", {"a": None, "b": None}),
    ],
)  # fmt: skip
def test_reader_takes_the_dialect(text: str, value: Any) -> None:
    assert fastjson.loads(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":{"x":[{"y":1}]},"b":{"$ref":"$.a.x[0]"}}', {"a": {"x": [{"y": 1}]}, "b": {"y": 1}}),
        ('{"a":[{"$ref":"$.b"}],"b":{"y":1}}', {"a": [{"y": 1}], "b": {"y": 1}}),
        ('{"a\\\\.b":1,"a.b":{"y":1},"c":{"$ref":"$.a\\\\.b"}}',
         {"a\\.b": 1, "a.b": {"y": 1}, "c": {"y": 1}}),
        ('{"a":{"$ref":"$.nothing.here"},"b":[{"$ref":"$.a[7]"}]}', {"a": None, "b": [None]}),
        ('{"a":[1],"b":{"$ref":"$.a[\u0660]"}}', {"a": [1], "b": None}),
        ('{"a":[1],"b":{"$ref":"$.a[' + "0" * 5_000 + ']"}}', {"a": [1], "b": None}),
        ('{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}', {"a": None, "b": None}),
        ('{"a":{"$ref":5}}', {"a": {"$ref": 5}}),
        ('{"$ref":"$"}', None),
    ],
)  # fmt: skip
def test_references_are_resolved(text: str, value: Any) -> None:
    assert fastjson.loads(text.encode()) == value


def test_references_to_what_is_around_them() -> None:
    root = fastjson.loads(b'{"a":{"up":{"$ref":".."},"self":{"$ref":"@"},"top":{"$ref":"$"}}}')
    assert root["a"]["up"] is root
    assert root["a"]["self"] is root["a"]
    assert root["a"]["top"] is root


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{a}",
        b"{a:}",
        b"{a:1 b:2}",
        b"[1 2]",
        b"{:1}",
        b"'x",
        b"'\\q'",
        b"'\\u12'",
        b"'\\ud800'",
        b"{a:bare}",
        b"{}{}",
        b"\xff",
        b"[" * 70 + b"]" * 70 + b"x",
        b"{" * 100_000,
        b"{" * 40 + b"a:1" + b"}:1" * 39 + b"}",
        b"{[1]:2}",
        b"{a:" + b"9" * 5000 + b"}",
        "{a:\u0661}".encode(),
        b"{a:1%b}" % (b" " * fastjson.DIALECT_BYTES_MAX),
    ],
)
def test_reader_refuses_what_is_neither(text: bytes) -> None:
    with pytest.raises(BadRequestError):
        fastjson.loads(text)


class Sample(msgspec.Struct, rename="camel"):
    some_name: str
    addrs: dict[int, str]
    absent: int | None = None


def test_writer_sorts_keys_and_leaves_nulls_out() -> None:
    value = Sample("x", {2: "b", 0: "a"})
    assert fastjson.dumps(value) == b'{"addrs":{"0":"a","2":"b"},"someName":"x"}'
    assert fastjson.dumps(value, Dialect.FASTJSON) == b'{"addrs":{0:"a",2:"b"},"someName":"x"}'


@pytest.mark.parametrize("dialect", list(Dialect))
def test_message_queue_keys_are_bare_objects_in_both_dialects(dialect: Dialect) -> None:
    table = {
        MessageQueue("T", "b", 1): 5,
        MessageQueue("T", "b", 0): None,
        MessageQueue("A", "b", 0): 7,
    }
    assert fastjson.dumps({"offsetTable": table}, dialect) == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"A"}:7,'
        b'{"brokerName":"b","queueId":1,"topic":"T"}:5}}'
    )  # fmt: skip


@pytest.mark.parametrize("dialect", list(Dialect))
def test_writer_covers_all_kinds(dialect: Dialect) -> None:
    value: Any = {"b": b"\x00\xff", "l": [1, True, None, 1.5, {}], "e": [], "s": 'q"\n<é>'}
    assert fastjson.dumps(value, dialect) == (
        '{"b":"AP8=","e":[],"l":[1,true,null,1.5,{}],"s":"q\\"\\n<é>"}'.encode()
    )
