"""The YAML of account files, and what of YAML is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitlog.errors import ConfigError
from remoting.access.plain_yaml import parse_plain_yaml

PLAIN_ACL = """\
# comment
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*   # another

accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
    groupPerms: []
  -
    accessKey: "rocketmq2"
    secretKey: 'a: # b'
    whiteRemoteAddress: 192.168.1.*
    topicPerms: [a=PUB, b=SUB]
"""


def test_a_plain_acl_file() -> None:
    assert parse_plain_yaml(PLAIN_ACL) == {
        "globalWhiteRemoteAddresses": ["10.10.103.*", "192.168.0.*"],
        "accounts": [
            {
                "accessKey": "RocketMQ",
                "secretKey": "12345678",
                "whiteRemoteAddress": None,
                "admin": "false",
                "topicPerms": ["topicA=DENY", "topicB=PUB|SUB"],
                "groupPerms": [],
            },
            {
                "accessKey": "rocketmq2",
                "secretKey": "a: # b",
                "whiteRemoteAddress": "192.168.1.*",
                "topicPerms": ["a=PUB", "b=SUB"],
            },
        ],
    }


def test_a_list_may_stand_as_far_left_as_its_key() -> None:
    assert parse_plain_yaml("a:\n- x\n- k: v\n  l: w\nb: y\n") == {
        "a": ["x", {"k": "v", "l": "w"}],
        "b": "y",
    }


def test_plain_yaml_keeps_patterns_of_addresses() -> None:
    assert parse_plain_yaml("a: *\nb: *.*  # all\nc:\n- *.*.*.*\n- 10.*\n") == {
        "a": "*",
        "b": "*.*",
        "c": ["*.*.*.*", "10.*"],
    }


def test_plain_yaml_reads_mappings_and_texts_in_any_form() -> None:
    assert parse_plain_yaml("a: {b: c}\nd: |\n  text\n") == {"a": {"b": "c"}, "d": "text\n"}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n"])
def test_nothing_is_none(text: str) -> None:
    assert parse_plain_yaml(text) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: b\n  c: d\n", 2),
        ("a: &anchor b\n", 1),
        ("a: *anchor\n", 1),
        ("a: !!str b\n", 1),
        ("? [a]\n: b\n", 1),
        ("a: \x01\n", 1),
        ("a:\n\t- b\n", 2),
        ("a: 1\na: 2\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("secret\n", 1),
        ("a: 'unclosed\n", 1),
        ("a: [b\n", 1),
        ("a: b: c\n", 1),
        ("- a\nb: c\n", 2),
    ],
)
def test_plain_yaml_refuses_the_rest_by_line_without_its_text(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=f"line {line}") as raised:
        parse_plain_yaml(text)
    assert "secret" not in str(raised.value)


def test_depth_has_a_limit() -> None:
    deep = "".join(f"{' ' * level}k:\n" for level in range(20)) + " " * 20 + "k: v\n"
    with pytest.raises(ConfigError, match="deeper than 8 levels"):
        parse_plain_yaml(deep)


@given(st.text(alphabet="ab:- \n\t'\"[]#{}&*,=|", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    said = "line "
    try:
        parse_plain_yaml(text)
    except ConfigError as error:
        said = str(error)
    assert said.startswith("line ")
