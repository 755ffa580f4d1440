"""What a daemon reports to systemd, over a real socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from dledger.remoting.service_manager import ServiceManager
from dledger.testing.doubles import VirtualClock


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


def all_of(listener: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(listener.recv(100))
        except BlockingIOError:
            return found


def test_start_and_stop_are_reported(listener: socket.socket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listener.getsockname()}, 1)
    manager.started(("127.0.0.1", 9876))
    manager.stopping()
    assert all_of(listener) == [b"READY=1", b"STOPPING=1"]


def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        name = f"dledger-test-{os.getpid()}"
        bound.bind(f"\0{name}")
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}, 1).started()
        assert bound.recv(100) == b"READY=1"


def test_nothing_happens_without_a_service_manager(tmp_path: Path) -> None:
    ServiceManager({}, 1).started()
    # One that has ended is no reason to end.
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}, 1).started()


async def test_watchdog_is_answered_twice_in_its_time(listener: socket.socket) -> None:
    environment = {
        "NOTIFY_SOCKET": listener.getsockname(),
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": "7",
    }
    with trio.move_on_after(59):
        await ServiceManager(environment, 7).keep_watchdog(VirtualClock())
    assert all_of(listener) == [b"WATCHDOG=1"] * 4
    await ServiceManager(environment, 8).keep_watchdog(VirtualClock())
    await ServiceManager({"WATCHDOG_USEC": "1"}, 7).keep_watchdog(VirtualClock())
    assert all_of(listener) == []
