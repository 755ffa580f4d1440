"""Credentials from files of both kinds."""

from __future__ import annotations

import pytest

from commitlog.errors import ConfigError
from remoting.access.account_file import parse_credentials
from remoting.protocol.signature import Credentials


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
