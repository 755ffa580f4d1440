"""Account files of both kinds: what they say, and what is refused in them."""

from __future__ import annotations

import pytest

from commitlog.errors import ConfigError
from remoting.access.account_file import accounts_document, parse_accounts
from remoting.access.accounts import AccountTable, Permission

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
        (f"[accounts.short]\n{SECRET}", "at least 7 characters"),
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
