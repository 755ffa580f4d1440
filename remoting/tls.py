"""TLS settings of a listener and of a client, from the files that a configuration names."""

from __future__ import annotations

import ssl

from commitlog.errors import ConfigError
from remoting.seams import ServerTls, TlsMode


def server_tls(
    mode: TlsMode,
    *,
    cert_file: str | None,
    key_file: str | None,
    client_ca_file: str | None = None,
) -> ServerTls:
    """Return the listener's TLS settings from files named in the configuration.

    Args:
        client_ca_file: When given, clients that speak TLS must show a certificate it signed.
    Raises:
        ConfigError: A file is missing or not what it should be, or `enforcing` has no certificate.
    """
    if mode == "disabled":
        return ServerTls("disabled")
    if cert_file is None:
        if mode == "enforcing":
            raise ConfigError("tls mode is enforcing but no certificate file is configured")
        return ServerTls("permissive")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file, _no_password)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {cert_file}, {key_file}: {error}") from error
    return ServerTls(mode, context)


def client_tls(
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    verify: bool = True,
) -> ssl.SSLContext:
    """Return a client's TLS settings from files named in the configuration.

    Args:
        ca_file: Authorities that sign servers; None means the authorities of this machine.
        verify: False accepts any certificate, as RocketMQ's test mode does.
    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file, _no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load TLS files {ca_file}, {cert_file}: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _no_password() -> str:
    """Stand in for the prompt that would stop a daemon: an encrypted key cannot be read."""
    return ""
