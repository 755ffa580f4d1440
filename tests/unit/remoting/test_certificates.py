"""Renewed certificates count for new handshakes, and broken files leave those of before."""

import ssl
from pathlib import Path

import pytest
import structlog.testing
import trio
import trustme
from cryptography import x509

from dledger.commitlog.disk import OsDisk
from dledger.remoting.certificates import RELOAD_INTERVAL_S, Certificates, TlsFiles
from dledger.remoting.tcp import client_tls, server_tls
from dledger.testing.doubles import InlineExecutor, VirtualClock

HOST = "127.0.0.1"


class Files:
    """The files of a server, and the authority that issues them."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.names = TlsFiles(*(str(folder / f"{name}.pem") for name in ("cert", "key", "ca")))
        self.ca.cert_pem.write_to_path(self.names.ca_file)
        self.serial = self.renew()

    def issue(self) -> tuple[trustme.LeafCert, int]:
        leaf = self.ca.issue_cert(HOST)
        return leaf, x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).serial_number

    def renew(self) -> int:
        leaf, serial = self.issue()
        self.write_cert(leaf)
        leaf.private_key_pem.write_to_path(self.names.key_file)
        return serial

    def write_cert(self, leaf: trustme.LeafCert) -> None:
        leaf.cert_chain_pems[0].write_to_path(self.names.cert_file)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def server(files: Files) -> ssl.SSLContext:
    names = files.names
    context = server_tls("enforcing", cert_file=names.cert_file, key_file=names.key_file).context
    assert context is not None
    return context


@pytest.fixture
def certificates(files: Files, server: ssl.SSLContext) -> Certificates:
    found = Certificates(OsDisk())
    found.watch(server, files.names)
    return found


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[int, ssl.SSLObject]:
    """Return the serial number that a server shows, and the client's side, without a socket."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=HOST)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        done = 0
        for side in (ours, theirs):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
        if done == 2:
            break
    der = ours.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number, ours


def test_a_renewed_certificate_is_shown_to_new_connections(
    files: Files, server: ssl.SSLContext, certificates: Certificates
) -> None:
    client = client_tls(ca_file=files.names.ca_file)
    serial, before = handshake(server, client)
    assert serial == files.serial
    assert certificates.look() == [], "nothing changed"
    renewed = files.renew()
    certificates.take(certificates.look())
    assert handshake(server, client)[0] == renewed != serial
    assert before.version() is not None, "a connection that is open stays"
    assert certificates.look() == [], "it is taken once"


def test_a_certificate_without_its_key_waits_for_it(
    files: Files, server: ssl.SSLContext, certificates: Certificates
) -> None:
    client = client_tls(ca_file=files.names.ca_file)
    leaf, renewed = files.issue()
    files.write_cert(leaf)
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            certificates.take(certificates.look())
            assert handshake(server, client)[0] == files.serial
        leaf.private_key_pem.write_to_path(files.names.key_file)
        certificates.take(certificates.look())
    assert handshake(server, client)[0] == renewed
    assert [line["event"] for line in lines] == ["certificates_kept", "certificates_read"]
    assert "PRIVATE" not in str(lines)


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_files_that_cannot_be_read_leave_those_of_before(
    files: Files, server: ssl.SSLContext, certificates: Certificates, content: bytes | None
) -> None:
    path = Path(files.names.cert_file)
    path.unlink() if content is None else path.write_bytes(content)
    with structlog.testing.capture_logs() as lines:
        certificates.take(certificates.look())
    assert handshake(server, client_tls(ca_file=files.names.ca_file))[0] == files.serial
    assert [line["event"] for line in lines] == ["certificates_kept"]


def test_new_authorities_are_believed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other")
    names = other.names
    server = server_tls("enforcing", cert_file=names.cert_file, key_file=names.key_file).context
    assert server is not None
    client = client_tls(ca_file=files.names.ca_file)
    certificates = Certificates(OsDisk())
    certificates.watch(client, TlsFiles(ca_file=files.names.ca_file))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client)
    both = files.ca.cert_pem.bytes() + other.ca.cert_pem.bytes()
    Path(files.names.ca_file).write_bytes(both)
    certificates.take(certificates.look())
    assert handshake(server, client)[0] == other.serial


def test_a_process_without_tls_watches_nothing() -> None:
    certificates = Certificates(OsDisk())
    certificates.watch(None, TlsFiles("/nowhere/cert.pem"))
    assert not certificates
    assert certificates.look() == []


async def test_files_are_read_again_after_a_while(
    files: Files, server: ssl.SSLContext, certificates: Certificates
) -> None:
    renewed = files.renew()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificates.keep_reading, VirtualClock(), InlineExecutor())
        await trio.sleep(RELOAD_INTERVAL_S + 1)
        nursery.cancel_scope.cancel()
    assert handshake(server, client_tls(ca_file=files.names.ca_file))[0] == renewed
