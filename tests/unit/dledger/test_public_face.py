"""`import dledger`: complete, lazy, and of use where POSIX is not."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import dledger
import dledger.blocking
import dledger.errors
from dledger.client import blocking as client_blocking
from dledger.client.core import errors as client_errors
from tests.harness.shipped_files import ROOT

pytestmark = pytest.mark.slow

FACE = ast.parse(Path(dledger.__file__).read_text())
MODULES: dict[str, str] = vars(dledger)["_MODULES"]


def typed_names() -> dict[str, str]:
    """Return name → module of what type checkers see."""
    (branch,) = (node for node in FACE.body if isinstance(node, ast.If))
    return {
        alias.name: f"dledger.{alias.name}" if node.module == "dledger" else str(node.module)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_face_table_types_and_all_agree() -> None:
    assert typed_names() == MODULES
    assert dledger.__all__ == list(MODULES)
    assert set(MODULES) <= set(dir(dledger))


@pytest.mark.parametrize("name", dledger.__all__)
def test_face_name_comes_from_its_module(name: str) -> None:
    module = import_module(MODULES[name])
    found = getattr(dledger, name)
    assert found is (module if MODULES[name] == f"dledger.{name}" else getattr(module, name))


def test_face_refuses_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'dledger' has no attribute 'Consumer'"):
        getattr(dledger, "Consumer")  # noqa: B009  # mypy knows as well
    assert not hasattr(dledger, "_missing")


def own_classes(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def test_face_errors_hold_every_error_of_the_client() -> None:
    assert own_classes(client_errors) <= set(dledger.errors.__all__)


def test_face_blocking_holds_every_class_of_the_blocking_client() -> None:
    shared = {"Closing", "LoopThread"}  # with the test kit; no program needs them
    assert own_classes(client_blocking) - shared == set(dledger.blocking.__all__)


def test_api_page_names_the_whole_face() -> None:
    page = (ROOT / "docs" / "reference" / "api" / "index.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(dledger.__all__)


EXAMPLES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_import_no_internal_name(page: Path) -> None:
    imported = re.findall(r"^ *(?:from|import) ([\w.]+)", page.read_text(), re.MULTILINE)
    ours = [name for name in imported if name.split(".")[0] in ("client", "remoting", "commitlog")]
    assert ours == []
    public = {"dledger", "dledger.aio", "dledger.blocking", "dledger.errors", "dledger.testing"}
    public.add("dledger.spark_jobs.engines.session")  # for jobs
    public.add("dledger.telemetry")  # needs an extra, so it is no name of `dledger`
    assert {name for name in imported if name.split(".")[0] == "dledger"} <= public


def run_python(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_face_import_loads_nothing(tmp_path: Path) -> None:
    program = """
import sys
before = set(sys.modules)
import dledger
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in sys.argv[2:]
    or name.partition(".")[0] not in sys.stdlib_module_names))
dledger.errors
print("trio" in sys.modules, "dledger.client.core.errors" in sys.modules)
"""
    assert run_python(program, tmp_path) == "['dledger']\nFalse True\n"


WITHOUT_POSIX = """
import ctypes, mmap, os, signal, socket, sys, warnings
from importlib.abc import MetaPathFinder

# What others make is ready for other systems; it chooses when it is imported.
import cbor2, cyclopts, lz4.frame, msgspec, numpy, structlog, trio, trio.testing, zstandard

BLOCKED = {
    "crypt", "fcntl", "grp", "nis", "posixshmem", "pty", "pwd", "resource", "spwd", "syslog",
    "termios", "tty",
}

class NoPosix(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in BLOCKED:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, NoPosix())

def remove(module, names):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

remove(os, "pwrite pwritev pread preadv posix_fallocate posix_fadvise fdatasync statvfs fstatvfs"
    " sysconf fork forkpty getuid geteuid getgid getegid getloadavg killpg setsid fchmod fchown"
    " chown mkfifo sched_getaffinity O_CLOEXEC O_DIRECTORY O_NONBLOCK O_SYNC O_DSYNC O_DIRECT")
remove(mmap, "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE PROT_EXEC MADV_DONTNEED"
    " MADV_WILLNEED MADV_SEQUENTIAL MADV_RANDOM MAP_POPULATE")
remove(socket, "TCP_USER_TIMEOUT SO_REUSEPORT MSG_DONTWAIT MSG_NOSIGNAL")
remove(signal, "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD setitimer")
real_library = ctypes.CDLL

def library(name, *rest, **options):
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    return real_library(name, *rest, **options)

ctypes.CDLL = library
open_file = os.open

def open_no_folder(path, flags, *rest, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, flags, *rest, **options)

os.open = open_no_folder
sys.platform = "win32"
"""

DRIVE_A_PRODUCER = """
import dledger

for name in dledger.__all__:
    if name != "testing":  # brokers are for Linux
        getattr(dledger, name)

# The cluster is made of the server's side, which is no part of a client.
from tests.unit.client.fake_cluster import open_world

async def main():
    async with open_world() as world:
        connecting = sys.modules[dledger.connect.__module__]
        connecting.TcpNetwork = lambda: world.network
        client = dledger.connect("10.0.0.2:9876", environment={})
        async with client, dledger.Producer(client, "P") as producer:
            result = await producer.send(dledger.Message("T", b"hello"))
            print(result.status.name, world.group.bodies())
        disk = connecting.OsDisk()
        path = sys.argv[1] + "/client/group/offsets.json"
        for text in (b"first", b"a\\nb"):
            disk.replace(path, text)
        print(disk.exists(path), disk.read(path))

trio.run(main)
print(sorted(BLOCKED & set(sys.modules)))
"""


def test_face_works_without_posix(tmp_path: Path) -> None:
    printed = run_python(WITHOUT_POSIX + DRIVE_A_PRODUCER, tmp_path)
    assert printed.splitlines() == ["SEND_OK [b'hello']", "True b'a\\nb'", "[]"]


SEND_IN_ASYNCIO = """
import asyncio
import dledger
from dledger import aio

for name in aio.__all__:  # loaded as on a system without POSIX
    getattr(aio, name)

async def main():
    async with aio.connect("127.0.0.1:1") as client, aio.Producer(client, "P") as producer:
        try:
            await producer.send(dledger.Message("T", b"x"), timeout_s=0.5)
        except dledger.errors.NoNameServerError as error:
            print(error.outcome)

sys.platform = "linux"  # trio asks for it at each start, and polls as this system does
asyncio.run(main())
print(sorted(BLOCKED & set(sys.modules)))
"""


def test_face_of_asyncio_works_without_posix(tmp_path: Path) -> None:
    # asyncio chooses its Windows half when it is imported, as the modules that are imported first.
    program = "import asyncio\n" + WITHOUT_POSIX + SEND_IN_ASYNCIO
    assert run_python(program, tmp_path) == "not_stored\n[]\n"


CONNECT_TO_A_SOCKET = """
import dledger
from dledger.blocking import BlockingClient

try:
    BlockingClient(f"127.0.0.1:{sys.argv[1]}").producer("P").send(dledger.Message("T", b""))
except dledger.errors.NoNameServerError as error:
    print(error.outcome)
"""


def test_face_connects_without_posix(tmp_path: Path) -> None:
    program = WITHOUT_POSIX + CONNECT_TO_A_SOCKET.replace("sys.argv[1]", "1")
    assert run_python(program, tmp_path) == "not_stored\n"
