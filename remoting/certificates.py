"""Certificates that are read again: a renewed one counts for new connections, without a restart.

The files of a context are compared with what it was made of. Where they differ, a context is made
of them first: a certificate whose key has not been replaced yet is left for the next look, and so
is one that cannot be read. Then they are loaded into the context in use. Connections that are open
stay as they are. Authorities are added; one that was taken out counts until the next start.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

from dledger.commitlog.seams import Disk
from dledger.remoting.log import get_logger
from dledger.remoting.seams import Clock, Executor, ServerTls, TlsMode
from dledger.remoting.tcp import client_tls, load_certificate, server_tls

RELOAD_INTERVAL_S: Final = 5.0
"""How soon changed files count. Certificates are renewed days before their end."""

_log = get_logger(__name__)


class TlsTable(Protocol):
    """A table of settings that names the files of a context."""

    tls_cert_file: str
    tls_key_file: str
    tls_ca_file: str


class TlsFiles(NamedTuple):
    """Files of one context, PEM; empty: there is none.

    Attributes:
        key_file: Its key; empty: the key stands in `cert_file`.
        ca_file: Authorities of the other side.
    """

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let *context* use what is in the files. Blocking.

        Raises OSError: one of them cannot be read, or not as what it is for; the key may be another
        certificate's. *context* may be half changed.
        """
        if self.cert_file:
            load_certificate(context, self.cert_file, self.key_file or None)
        if self.ca_file:
            context.load_verify_locations(self.ca_file)


@dataclass(slots=True, eq=False)
class _Watched:
    context: ssl.SSLContext
    files: TlsFiles
    digest: bytes
    complaint: str = ""


class Look(NamedTuple):
    """What was found of one context: other files than before, or files that cannot be used."""

    watched: _Watched
    digest: bytes
    problem: str


class Certificates:
    """The TLS contexts of a process, and the files that each was made of."""

    def __init__(self, disk: Disk) -> None:
        """Begin with no context; *disk* reads the files to compare them."""
        self._disk = disk
        self._watched: list[_Watched] = []

    def __bool__(self) -> bool:
        return bool(self._watched)

    def of_server(self, mode: TlsMode, table: TlsTable) -> ServerTls:
        """Return the TLS of a port, kept as the files of *table* are.

        Raises ConfigError: a file is missing or not what it should be.
        """
        files = TlsFiles(table.tls_cert_file, table.tls_key_file, table.tls_ca_file)
        cert, key, authorities = (name or None for name in files)
        tls = server_tls(mode, cert_file=cert, key_file=key, client_ca_file=authorities)
        self.watch(tls.context, files)
        return tls

    def of_client(self, table: TlsTable) -> ssl.SSLContext:
        """Return the TLS towards servers; as `of_server`."""
        files = TlsFiles(table.tls_cert_file, table.tls_key_file, table.tls_ca_file)
        cert, key, authorities = (name or None for name in files)
        context = client_tls(ca_file=authorities, cert_file=cert, key_file=key)
        self.watch(context, files)
        return context

    def watch(self, context: ssl.SSLContext | None, files: TlsFiles) -> None:
        """Keep *context*, which was just made of *files*, as they are; None: nothing.

        Raises OSError: one of them cannot be read.
        """
        if context is not None:
            self._watched.append(_Watched(context, files, self._digest(files)))

    def look(self) -> list[Look]:
        """Return the contexts whose files are others than before. Blocking."""
        found = []
        for watched in self._watched:
            try:
                digest = self._digest(watched.files)
                if digest == watched.digest:
                    continue
                watched.files.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            except OSError as error:
                found.append(Look(watched, b"", _reason(error)))
            else:
                found.append(Look(watched, digest, ""))
        return found

    def take(self, looks: Sequence[Look]) -> None:
        """Let new connections use what `look` found; name once what cannot be used."""
        for watched, digest, problem in looks:
            if not problem:
                try:
                    watched.files.load_into(watched.context)
                except OSError as error:  # replaced in between; the next look finds them again
                    problem = _reason(error)
            if not problem:
                watched.digest, watched.complaint = digest, ""
                _log.info("certificates_read", files=_named(watched.files))
            elif problem != watched.complaint:
                watched.complaint = problem
                _log.error(
                    "certificates_kept",
                    files=_named(watched.files),
                    error=problem,
                    next_step="replace them; until then those of before are used",
                )

    async def keep_reading(self, clock: Clock, executor: Executor) -> None:
        """Look at the files until cancelled."""
        while True:
            await clock.sleep(RELOAD_INTERVAL_S)
            self.take(await executor.run(self.look, kind="certificates"))

    def _digest(self, files: TlsFiles) -> bytes:
        total = sha256()
        for path in filter(None, files):
            total.update(sha256(self._disk.read(path)).digest())
        return total.digest()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _named(files: TlsFiles) -> str:
    return ", ".join(filter(None, files))
