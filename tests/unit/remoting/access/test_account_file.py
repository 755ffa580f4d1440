"""Account files of both kinds: what they say, and what is refused in them.

Accounts are read again; a broken file keeps those there were, and reports it.

Credentials from files of both kinds.

The YAML of account files, and what of YAML is refused.
"""

from pathlib import Path

import pytest
import structlog.testing
import trio
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.remoting.access.account_file import (
    RELOAD_INTERVAL_S,
    AccountStore,
    accounts_document,
    parse_accounts,
    parse_credentials,
    parse_plain_yaml,
)
from dledger.remoting.access.accounts import AccountTable, Permission
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.signature import Credentials
from dledger.testing.doubles import InlineExecutor

PUB, SUB, DENY = Permission.PUB, Permission.SUB, Permission.DENY

TOML = """\
global_white_addresses = ["10.10.103.*"]

[accounts.orders-1]
secret_key = "0123456789"
white_address = "192.168.0.7"
default_group_perm = "SUB"
topics = { orders = "PUB|SUB", "%RETRY%billing" = "SUB" }
groups = { shipping = "DENY" }

[accounts."admin.1"]
secret_key = "9876543210"
admin = true
"""

YAML = """\
globalWhiteRemoteAddresses:
- 10.10.103.*
accounts:
- accessKey: orders-1
  secretKey: 0123456789
  whiteRemoteAddress: 192.168.0.7
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - orders=PUB|SUB
  groupPerms:
  - shipping=DENY
  - billing=SUB
- accessKey: admin.1
  secretKey: 9876543210
  admin: true
"""


@pytest.mark.parametrize(("path", "text"), [("a.toml", TOML), ("conf/plain_acl.yml", YAML)])
def test_both_kinds_of_file_say_the_same(path: str, text: str) -> None:
    check(parse_accounts(path, text.encode()))


def check(table: AccountTable) -> None:
    assert table.white.fits("10.10.103.9")
    orders, admin = table
    assert (orders.access_key, orders.secret_key) == ("orders-1", "0123456789")
    assert not orders.is_admin
    assert orders.white.fits("192.168.0.7")
    assert (orders.default_topic, orders.default_group) == (DENY, SUB)
    assert orders.topics == {"orders": PUB | SUB}
    assert orders.groups == {"shipping": DENY, "billing": SUB}
    assert (admin.access_key, admin.is_admin) == ("admin.1", True)
    assert (admin.default_topic, admin.default_group) == (DENY, DENY)
    assert not admin.white


def test_what_is_written_is_read_again() -> None:
    table = parse_accounts("a.toml", TOML.encode())
    check(parse_accounts("b.toml", accounts_document(table).encode()))


def test_an_empty_file_is_no_accounts() -> None:
    assert len(parse_accounts("a.toml", b"")) == 0
    assert len(parse_accounts("plain_acl.yml", b"accounts:\n")) == 0


SECRET = 'secret_key = "do-not-show-me"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[account.a]\n", "unknown key 'account'"),
        (f"[accounts.someone]\n{SECRET}admim = true\n", "account someone: unknown key 'admim'"),
        (f"[accounts.someone]\n{SECRET}admin = 1\n", "admin is true or false"),
        (f"[accounts.someone]\n{SECRET}default_topic_perm = 'PUBLISH'\n", "default_topic_perm"),
        (f"[accounts.someone]\n{SECRET}topics = {{ T = 'PUP' }}\n", "topics.T = 'PUP'"),
        (f"[accounts.someone]\n{SECRET}topics = ['T=PUB']\n", "expected a table"),
        (f"[accounts.someone]\n{SECRET}white_address = '1.2.3'\n", "not an address"),
        (f'[accounts.""]\n{SECRET}', "it has a name"),
        ("[accounts.someone]\nsecret_key = 12345678\n", "at least 7 characters"),
        ("[accounts.someone]\nsecret_key = 'short'\n", "at least 7 characters"),
        ("[accounts.someone]\n", "at least 7 characters"),
        (f"[accounts.someone]\n{SECRET[:-2]}\n", "not TOML: at line 2"),
        ("global_white_addresses = 7\n", "expected addresses"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_without_a_secret(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_accounts("conf/accounts.toml", text.encode())
    assert str(raised.value).startswith("conf/accounts.toml: ")
    assert words in str(raised.value)
    assert "do-not-show-me" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accounts:\n- secretKey: do-not-show-me\n", "accessKey is missing"),
        ("accounts:\n- accessKey: someone\n  secretKey: do-not-show-me\n  perms: x\n", "'perms'"),
        ("accounts: x\n", "expected a list"),
        ("users: x\n", "unknown key 'users'"),
        (
            "accounts:\n- accessKey: someone\n  secretKey: do-not-show-me\n  topicPerms:\n  - T\n",
            "'T' is not name=permission",
        ),
        ("accounts:\n" + "- accessKey: someone\n  secretKey: do-not-show-me\n" * 2, "twice"),
    ],
)
def test_a_mistake_in_plain_acl_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_accounts("plain_acl.yml", text.encode())
    assert words in str(raised.value)
    assert "do-not-show-me" not in str(raised.value)


def test_a_file_that_is_no_text_or_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_accounts("a.toml", b"\xff\xfe")
    with pytest.raises(ConfigError, match="4194305 bytes, at most 4194304"):
        parse_accounts("a.toml", b"#" * ((4 << 20) + 1))


ONE = '[accounts.account-1]\nsecret_key = "0123456789"\n'
TWO = ONE + '[accounts.account-2]\nsecret_key = "0123456789"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "accounts.toml"
    path.write_text(ONE)
    return path


async def test_a_change_counts_after_the_interval(path: Path, nursery: trio.Nursery) -> None:
    store = AccountStore(OsDisk(), str(path))
    nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
    assert store.table.get("account-2") is None
    path.write_text(TWO)
    await trio.sleep(RELOAD_INTERVAL_S * 1.5)
    assert store.table.get("account-2") is not None
    path.write_text("")
    await trio.sleep(RELOAD_INTERVAL_S)
    assert len(store.table) == 0


@pytest.mark.parametrize("broken", ["[accounts.account-1]\nsecret_key = 1\n", "[[[", None])
async def test_account_store_keeps_accounts_of_a_broken_file(
    path: Path, nursery: trio.Nursery, broken: str | None
) -> None:
    store = AccountStore(OsDisk(), str(path))
    with structlog.testing.capture_logs() as lines:
        nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        await trio.sleep(RELOAD_INTERVAL_S * 5.5)
        assert store.table.get("account-1") is not None
        kept = [line for line in lines if line["event"] == "accounts_kept"]
        assert len(kept) == 1
        assert kept[0]["log_level"] == "error"
        assert str(path) in kept[0]["error"]
        path.write_text(TWO)
        await trio.sleep(RELOAD_INTERVAL_S)
    assert store.table.get("account-2") is not None
    assert lines[-1]["event"] == "accounts_read"


async def test_account_store_reports_a_file_that_is_whole_again(
    path: Path, nursery: trio.Nursery
) -> None:
    store = AccountStore(OsDisk(), str(path))
    with structlog.testing.capture_logs() as lines:
        nursery.start_soon(store.keep_reading, TrioClock(), InlineExecutor())
        path.write_text("[[[")
        await trio.sleep(RELOAD_INTERVAL_S * 1.5)
        path.write_text(ONE)
        await trio.sleep(RELOAD_INTERVAL_S * 3)
    assert [line["event"] for line in lines] == ["accounts_kept", "accounts_as_before"]


@pytest.mark.parametrize("content", [None, "[[["])
def test_nothing_starts_without_accounts(path: Path, content: str | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"accounts\.toml"):
        AccountStore(OsDisk(), str(path))


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("c.toml", 'access_key = "me"\nsecret_key = "s"\n', Credentials("me", "s")),
        (
            "c.toml",
            'access_key = "me"\nsecret_key = "s"\nsecurity_token = "t"\n',
            Credentials("me", "s", "t"),
        ),
        ("tools.yml", "accessKey: me\nsecretKey: 123\n", Credentials("me", "123")),
    ],
)
def test_both_kinds_of_file(path: str, text: str, expected: Credentials) -> None:
    assert parse_credentials(path, text.encode()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        'access_key = "me"\n',
        'secret_key = "do-not-show-me"\n',
        'access_key = "me"\nsecret_key = ""\n',
        'access_key = "me"\nsecret_key = "do-not-show-me"\nsecret = 1\n',
        'access_key = "me"\nsecret_key = "do-not-show-me\n',
    ],
)
def test_credentials_file_names_what_is_missing_without_secrets(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c\.toml: ") as raised:
        parse_credentials("c.toml", text.encode())
    assert "do-not-show-me" not in str(raised.value)


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
