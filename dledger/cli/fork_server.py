"""Children of this process, forked by a server that has imported what daemons run.

A daemon imports 800 modules, a second of processor time; a fork takes milliseconds. So a cluster
on one machine starts as soon as one interpreter has. Run as a file, the module is the server: it
forks a child for each request on its standard input, and writes how each ends into a pipe.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import trio

PRELOADED: Final = (
    "dledger.cli.main",
    "dledger.cli.broker_command",
    "dledger.broker",
    "dledger.commitlog.disk",
    "dledger.namesrv.command",
    "dledger.namesrv.server",
    "dledger.remoting.tcp",
)
"""What brokers and NameServers import. No grpc: its threads do not live on in a fork."""

PR_SET_PDEATHSIG: Final = 1
_NUMBER: Final = struct.Struct("!i")
STOP_TIMEOUT_S: Final = 10.0
"""The server ends when its socket closes; one that still imports needs a second or two more."""


class Child:
    """A forked process. Get it from `start_child`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit status, or minus the signal that ended it; None while it runs, as `poll` saw it."""
        self._status = status

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self.returncode is None:
            try:
                data = os.read(self._status, _NUMBER.size)
            except BlockingIOError:
                return None
            os.close(self._status)
            # Without a word the server has died, and the kernel has killed its children.
            self.returncode = _NUMBER.unpack(data)[0] if data else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    async def ended(self) -> None:
        """Wait until it has ended; several tasks may."""
        while self.poll() is None:
            status = os.dup(self._status)
            try:
                await trio.lowlevel.wait_readable(status)
            finally:
                os.close(status)


class _ForkServer:
    def __init__(self, executable: str, path: str) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [executable, "-P", __file__],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": path},
                # Ctrl-C goes to the parent alone; it stops the children in order.
                start_new_session=True,
            )
        atexit.register(self._close)

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
        text = json.dumps(request).encode()
        status, theirs = os.pipe()
        os.set_blocking(status, False)
        try:
            socket.send_fds(self._link, [_NUMBER.pack(len(text))], [theirs, *descriptors])
            self._link.sendall(text)
            answer = self._link.recv(_NUMBER.size, socket.MSG_WAITALL)
            if not answer:
                raise ConnectionResetError("the fork server has ended")
        except ConnectionError:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return Child(_NUMBER.unpack(answer)[0], status)

    def _close(self) -> None:
        self._link.close()
        self._process.wait(STOP_TIMEOUT_S)


_lock: Final = threading.Lock()
_servers: Final[dict[tuple[str, str], _ForkServer]] = {}
"""Those of this process, by interpreter and ``PYTHONPATH``."""


async def start_child(
    module: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> Child:
    """Run ``python -m module arguments…`` and return it; it appends to the log.

    It dies with this process. The first call per interpreter and ``PYTHONPATH`` starts the server
    that is the parent, and takes as long as its imports.

    Raises:
        ConnectionError: A new server ended before it answered; nothing of this call runs on.
    Cancellation: Only before it begins; a child that exists is returned.
    """
    request = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
    }

    key = sys.executable, environment["PYTHONPATH"]

    def start(descriptors: Sequence[int]) -> Child:
        with _lock:
            try:
                return _servers[key].start(request, descriptors)
            except (KeyError, ConnectionError):  # none yet, or it has died, and its children
                _servers[key] = _ForkServer(*key)
                return _servers[key].start(request, descriptors)

    with log_path.open("ab") as log, _network_namespace() as namespace:
        return await trio.to_thread.run_sync(start, [log.fileno(), *namespace])


@contextmanager
def _network_namespace() -> Iterator[list[int]]:
    """Yield a descriptor of the one this thread is in: the server may be in another."""
    if sys.platform != "linux":
        yield []
        return
    with open("/proc/thread-self/ns/net", "rb") as namespace:
        yield [namespace.fileno()]


# ------------------------------------------------------------------------------- in the server


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended")


def _requests(link: socket.socket) -> Any:
    """Fork a child per request; return its request in the child, None in the server at the end."""
    statuses: dict[int, int] = {}

    def reap(*_: object) -> None:
        while statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with os.fdopen(statuses.pop(pid), "wb") as pipe:
                pipe.write(_NUMBER.pack(os.waitstatus_to_exitcode(status)))

    signal.signal(signal.SIGCHLD, reap)
    while True:
        size, descriptors, _, _ = socket.recv_fds(link, _NUMBER.size, 3)
        if not size:
            return None
        status, log, *namespace = descriptors
        request = json.loads(link.recv(_NUMBER.unpack(size)[0], socket.MSG_WAITALL))
        # A child that ends at once is reaped after its status pipe is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            for other in namespace:
                _enter(other)
            for descriptor in (*descriptors, *statuses.values()):
                os.close(descriptor)
        else:
            statuses[pid] = status
            for descriptor in (log, *namespace):
                os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if pid == 0:
            return request
        link.sendall(_NUMBER.pack(pid))


def _enter(namespace: int) -> None:
    """Move into a network namespace, which only a privileged process may, unless it is in it."""
    if os.fstat(namespace).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _main() -> None:
    """Serve the socket that is standard input; in a child, run what the request names."""
    for name in PRELOADED:
        with suppress(ImportError):  # another tree may have no such module
            importlib.import_module(name)
    gc.freeze()
    server_pid = os.getpid()
    with socket.socket(fileno=0) as link:
        request = _requests(link)
    if request is not None:
        die_with(server_pid)
        os.open(os.devnull, os.O_RDONLY)  # the lowest free number: standard input
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv[1:] = request["arguments"]
        status = 0
        try:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if isinstance(end.code, str):
                raise
            status = end.code or 0
        sys.stdout.flush()
        # Taking 800 modules apart would copy the pages that all children share.
        os._exit(status)


if __name__ == "__main__":
    _main()
