"""A network of the run's own: a namespace for every process, and one that routes between them.

::

    n0 ─────── eth0 10.77.1.2 and .3 ─┐
    ns0 ────── eth0 10.77.4.2 and .3 ─┼─ router
    clients ── eth0 10.77.6.2 and .3 ─┘

At its first address a process serves, at the second the runner watches it, whatever is cut. A cut
is a rule of the router, one way between two first addresses: packets vanish, so connections are
left half open. Namespaces have no names: they end with the runner and the processes in them.

The proxy makes links slow and resets connections; only here packets vanish, so that TCP itself has
to find out.

Everything here blocks, for tens of milliseconds as a rule.

``python -m dledger.jepsen_like.chaos.namespaces NAMESPACE MODULE …`` runs MODULE in the network
namespace of that file, with the rest as its arguments.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.jepsen_like.nemesis.ground import FaultError

HOSTS_MAX: Final = 250
"""One number of an address distinguishes hosts."""

RULE_PRIORITY: Final = 10
"""Rules that cut come before the router's ordinary tables."""

COMMAND_TIMEOUT_S: Final = 30
"""Seconds `ip` may take before the machine is called unfit."""

_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """The machine of one process.

    Attributes:
        address: Where it serves.
        watch_address: Where it answers the runner, past every cut.
        namespace: File of its network namespace; None: the machine's own network.
    """

    address: str
    watch_address: str
    namespace: Path | None = None


LOOPBACK: Final = Host("127.0.0.1", "127.0.0.1")


@functools.cache
def why_not() -> str | None:
    """Return why no network can be made here, in one sentence; None when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "ip is not installed; the package iproute2 has it"
    try:
        with run_network(("a", "b")) as network:
            one, other = (host.address for host in network.hosts.values())
            network.route(rule_lines((), ((one, other),)))
    except FaultError as error:
        return f"a trial of a network of its own failed: {error}"
    return None


# -- the commands of `ip`, as text --------------------------------------------------------------


def rule_lines(
    before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> Sequence[str]:
    """Return the orders that make the router cut the links *after* where it cuts *before*."""
    there, wanted = frozenset(before), frozenset(after)
    changes = [("del", pair) for pair in sorted(there - wanted)]
    changes += [("add", pair) for pair in sorted(wanted - there)]
    return [
        f"rule {verb} priority {RULE_PRIORITY} from {source} to {target} blackhole"
        for verb, (source, target) in changes
    ]


# -- doing it -----------------------------------------------------------------------------------


@contextmanager
def entered(namespace: Path) -> Iterator[None]:
    """Let what this thread opens and starts be in *namespace* while the block runs.

    Sockets stay where they were made. Other threads are not touched.

    Raises FaultError: it cannot be entered; the thread is where it was.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        try:
            yield
        finally:
            _set_namespace(before, "the machine's own network")
    finally:
        os.close(before)


def enter(namespace: Path) -> None:
    """Move this thread into *namespace*.

    Raises FaultError: it cannot be entered; the thread is where it was.
    """
    try:
        handle = os.open(namespace, os.O_RDONLY)
    except OSError as error:
        raise FaultError(f"there is no network namespace {namespace}: {error}") from error
    try:
        _set_namespace(handle, str(namespace))
    finally:
        os.close(handle)


def _set_namespace(handle: int, name: str) -> None:
    if _libc().setns(handle, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise FaultError(f"{name} could not be entered: {os.strerror(number)}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class RunNetwork:
    """The network of a run. Get it from `run_network`; *hosts*: by name."""

    def __init__(self, router: Path, namespaces: Mapping[str, Path]) -> None:
        self._router = router
        self.hosts: Mapping[str, Host] = {
            name: Host(f"10.77.{number}.2", f"10.77.{number}.3", namespace)
            for number, (name, namespace) in enumerate(namespaces.items(), 1)
        }

    def route(self, lines: Iterable[str]) -> None:
        """Give orders to the router, as `ip -batch` takes them.

        Raises FaultError: one was refused; those before it were carried out.
        """
        self._order(self._router, lines)

    def _make(self) -> None:
        links: list[str] = ["link set lo up"]
        for number, host in enumerate(self.hosts.values(), 1):
            port = f"port{number}"
            links += [
                f"link add {port} type veth peer name eth0 netns {host.namespace}",
                f"addr add 10.77.{number}.1/24 dev {port}",
                f"link set {port} up",
            ]
        self.route(links)
        for number, host in enumerate(self.hosts.values(), 1):
            lines = [
                "link set lo up",
                f"addr add {host.address}/24 dev eth0",
                f"addr add {host.watch_address}/24 dev eth0",
                "link set eth0 up",
                f"route add default via 10.77.{number}.1",
            ]
            assert host.namespace is not None
            self._order(host.namespace, lines)
        with entered(self._router):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _order(self, namespace: Path, lines: Iterable[str]) -> None:
        # Not `ip -n`: it would hold copies of all mounts for a while, those of brokers' disks too.
        with entered(namespace):
            _ip(lines)


@contextmanager
def run_network(names: Sequence[str]) -> Iterator[RunNetwork]:
    """Make a network while the block runs; it ends then, with the processes in it.

    Raises FaultError: it could not be made (see `why_not`); nothing of it is left.
    """
    if len(names) > HOSTS_MAX:
        raise FaultError(f"a network of {len(names)} hosts; {HOSTS_MAX} at most")
    with ExitStack() as stack:
        try:
            router, *namespaces = (
                stack.enter_context(new_namespace()) for _ in range(len(names) + 1)
            )
            network = RunNetwork(router, dict(zip(names, namespaces, strict=True)))
            network._make()
        except OSError as error:
            raise FaultError(f"a network could not be made: {error}") from error
        yield network


@contextmanager
def new_namespace() -> Iterator[Path]:
    """Yield the file of a new network namespace, which is there while this process has it open."""
    own = Path("/proc/thread-self/ns/net")
    with entered(own):  # and back
        if _libc().unshare(_CLONE_NEWNET):
            raise FaultError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        handle = os.open(own, os.O_RDONLY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


def _ip(lines: Iterable[str]) -> None:
    orders = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(
            ["ip", "-batch", "-"],
            input=orders,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FaultError(f"ip could not be run: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise FaultError(f"ip refused an order for the network of the run: {said}")


if __name__ == "__main__":
    namespace, module, *rest = sys.argv[1:]
    enter(Path(namespace))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
