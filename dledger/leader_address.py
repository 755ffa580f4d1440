"""Makes `broker.leader_address` lead to this member while it leads, and to it no longer afterwards.

::

    start ──► hook loss ──► wait for leadership ──► hook gain ──► listen ──► leadership ends
                                   ▲                                              │
                                   └── hook loss ◄── reset connections ◄── stop listening

With a hook all of that is done at once: another machine has the address. Without one, connections
are reset when what was under way on them is answered, through the next leader.

A loss that fails ends the process: two members that hold the address are worse than one less.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog
import trio

from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup
from dledger.remoting.addresses import split_address
from dledger.remoting.seams import Clock
from dledger.remoting.server import RemotingServer
from dledger.settings.tables import BrokerTable
from dledger.waiting import Wakeup

RunCommand: TypeAlias = Callable[[Sequence[str]], Awaitable[None]]
"""Runs a program to its end; raises OSError where it cannot be run, or ends with an error."""

RETRY_S: Final = 0.2
"""After a gain that failed: the member that led last may hold the address for a moment."""

RESET_AFTER_S: Final = 0.5
"""After leadership that moved: what was under way is carried to the next leader and answered."""

RESET_REASON: Final = "this member does not lead any more"

log = structlog.get_logger(__name__)


class LeaderAddressError(MQError):
    """The address cannot be given back: this member stops, so that no two members hold it."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"broker.leader_address {address} is not given back: {reason}; this member stops, so"
            " that no two hold it; run broker.leader_hook by hand with loss, and mend it"
        )


@dataclass(eq=False)
class LeaderAddress:
    """Holds the address from gain to loss.

    *servers*: their connections are reset on a loss: those to the address where it alone is
    listened at, else all, since what moves the address may hide it from this machine.
    """

    group: BrokerGroup
    broker: BrokerTable
    servers: Sequence[RemotingServer]
    clock: Clock
    run_command: RunCommand
    _changed: Wakeup = field(default_factory=Wakeup)

    def role_changed(self) -> None:
        """Look whether the group's leadership began or ended; call it at every change of role."""
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the address whenever this member leads; started when it holds it certainly not.

        Raises LeaderAddressError: It cannot be given back; the process must end.
        Cancellation: The address is given back first.
        """
        if not self.broker.leader_address:
            return task_status.started()
        await self._lose()  # a process that was killed held it perhaps
        task_status.started()
        while True:
            leadership = self.group.leadership
            if leadership is None:
                await self._changed.wait()
                continue
            try:
                await self._hold(leadership)
            finally:
                with trio.CancelScope(shield=True):
                    await self._lose()

    async def _hold(self, leadership: object) -> None:
        """Gain the address and keep it until *leadership* has ended."""
        accepting = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gain, accepting)
            while self.group.leadership is leadership:
                await self._changed.wait()
            accepting.cancel()
            if not self.broker.leader_hook:
                await self.clock.sleep(RESET_AFTER_S)
            self._reset_connections()
            nursery.cancel_scope.cancel()

    async def _gain(self, accepting: trio.CancelScope) -> None:
        reason = ""
        while not accepting.cancel_called:
            try:
                await self._call_hook("gain")
                if self.broker.leader_address_listen:
                    address = split_address(self.broker.leader_address)
                    await self.servers[0].serve(*address, accepting=accepting)
            except OSError as error:
                if reason != (reason := str(error)):
                    log.warning("leader_address_not_gained", reason=reason, again_in_s=RETRY_S)
            else:
                return
            await self.clock.sleep(RETRY_S)

    def _reset_connections(self) -> None:
        is_known = self.broker.leader_address_listen and not self.broker.leader_hook
        address = split_address(self.broker.leader_address)
        for server in self.servers:
            for connection in list(server.connections):
                if not is_known or connection.local_address == address:
                    connection.reset(RESET_REASON)

    async def _lose(self) -> None:
        try:
            await self._call_hook("loss")
        except OSError as error:
            raise LeaderAddressError(self.broker.leader_address, str(error)) from error

    async def _call_hook(self, event: str) -> None:
        """Run the hook; raises OSError: it failed, or was not done in time."""
        hook = shlex.split(self.broker.leader_hook)
        if not hook:
            return
        timeout_s = self.broker.leader_hook_timeout_ms / 1000
        with self.clock.time_out(timeout_s) as scope:
            await self.run_command([*hook, event, self.broker.leader_address])
            log.info("leader_hook_ended", event_name=event)
        if scope.cancelled_caught:
            raise TimeoutError(f"{hook[0]} {event} was not done within {timeout_s} s")
