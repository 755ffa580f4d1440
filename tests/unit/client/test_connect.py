"""Credentials and TLS from the environment, and on every request of a client."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from dledger.client.connect import connect, credentials_from, tls_from
from dledger.client.core.client_instance import ClientConfig
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.signature import Credentials

ME = Credentials("order-service", "do-not-show-me")


def test_nothing_named_is_nothing() -> None:
    assert credentials_from({}) is None
    assert tls_from({}) is None


def test_credentials_come_from_variables_or_from_a_file(tmp_path: Path) -> None:
    variables = {"DLEDGER_ACCESS_KEY": "order-service", "DLEDGER_SECRET_KEY": "do-not-show-me"}
    assert credentials_from(variables) == ME
    assert credentials_from({**variables, "DLEDGER_SECURITY_TOKEN": "t"}) == Credentials(
        "order-service", "do-not-show-me", "t"
    )
    path = tmp_path / "tools.yml"
    path.write_text("accessKey: order-service\nsecretKey: do-not-show-me\n")
    assert credentials_from({"DLEDGER_CREDENTIALS": str(path)}) == ME


@pytest.mark.parametrize(
    "environment",
    [
        {"DLEDGER_ACCESS_KEY": "order-service"},
        {"DLEDGER_SECRET_KEY": "do-not-show-me"},
        {"DLEDGER_CREDENTIALS": "/missing/tools.yml"},
    ],
)
def test_half_of_it_is_an_error_without_the_secret(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        credentials_from(environment)
    assert "do-not-show-me" not in str(raised.value)
    with pytest.raises(ConfigError):
        connect("127.0.0.1:9876", environment=environment)


def test_tls_comes_from_variables(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(path)
    context = tls_from({"DLEDGER_TLS_CA_FILE": str(path)})
    assert context is not None
    assert context.check_hostname
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_from({"DLEDGER_TLS_CA_FILE": str(tmp_path / "none.pem")})


def test_what_the_caller_gives_counts_before_the_environment() -> None:
    environment = {"DLEDGER_ACCESS_KEY": "someone-else", "DLEDGER_SECRET_KEY": "0123456789"}
    assert connect("a:1", environment=environment).config.credentials == Credentials(
        "someone-else", "0123456789"
    )
    client = connect("a:1", ClientConfig(credentials=ME), environment=environment)
    assert client.config.credentials is ME
    assert "do-not-show-me" not in repr(client.config)
