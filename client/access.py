"""How tools and clients of this machine prove who they are: from the environment.

========================= ==============================================================
variable                  holds
========================= ==============================================================
DLEDGER_CREDENTIALS       a file with access_key and secret_key, or RocketMQ's tools.yml
DLEDGER_ACCESS_KEY        instead of the file
DLEDGER_SECRET_KEY        with it
DLEDGER_SECURITY_TOKEN    with it, where one is needed
DLEDGER_TLS_CA_FILE       who signs servers; set, connections are TLS
DLEDGER_TLS_CERT_FILE     certificate of this client, where servers ask for one
DLEDGER_TLS_KEY_FILE      its key
========================= ==============================================================
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commitlog.errors import ConfigError
from remoting.access.credentials_file import parse_credentials
from remoting.edge import client_tls
from remoting.protocol.signature import Credentials

CREDENTIALS_FILE: Final = "DLEDGER_CREDENTIALS"
ACCESS_KEY: Final = "DLEDGER_ACCESS_KEY"
SECRET_KEY: Final = "DLEDGER_SECRET_KEY"
SECURITY_TOKEN: Final = "DLEDGER_SECURITY_TOKEN"
TLS_CA_FILE: Final = "DLEDGER_TLS_CA_FILE"
TLS_CERT_FILE: Final = "DLEDGER_TLS_CERT_FILE"
TLS_KEY_FILE: Final = "DLEDGER_TLS_KEY_FILE"


def credentials_from(environment: Mapping[str, str]) -> Credentials | None:
    """Return the credentials that the environment names, None when it names none.

    Raises:
        ConfigError: Half of them, or a file that cannot be read; shows no secret.
    """
    path = environment.get(CREDENTIALS_FILE)
    if path:
        try:
            return parse_credentials(path, Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{CREDENTIALS_FILE}: {path}: {error.strerror}") from None
    access_key = environment.get(ACCESS_KEY, "")
    secret_key = environment.get(SECRET_KEY, "")
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        raise ConfigError(f"{ACCESS_KEY} and {SECRET_KEY} go together")
    return Credentials(access_key, secret_key, environment.get(SECURITY_TOKEN) or None)


def tls_from(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS that the environment asks for, None when it asks for none.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    authorities = environment.get(TLS_CA_FILE)
    if not authorities:
        return None
    return client_tls(
        ca_file=authorities,
        cert_file=environment.get(TLS_CERT_FILE) or None,
        key_file=environment.get(TLS_KEY_FILE) or None,
    )
