"""A program with the product's SDK in it, which may be killed in the middle of what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from client.connect import connect
from client.core.client_instance import ClientConfig, ClientInstance


class RealClient:
    """A machine of clients; see `jepsen_like.nemesis.ground.Machine`.

    Args:
        nursery: Where its program runs.
    """

    def __init__(
        self,
        name: str,
        name_servers: tuple[str, ...],
        program: Callable[[RealClient], Awaitable[None]],
        nursery: trio.Nursery,
        *,
        rpc_timeout_s: float,
    ) -> None:
        self._name = name
        self._name_servers = name_servers
        self._program = program
        self._nursery = nursery
        self._rpc_timeout_s = rpc_timeout_s
        self._scope: trio.CancelScope | None = None
        self._ended = trio.Event()
        self.instance: ClientInstance | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def is_up(self) -> bool:
        """Whether its program runs."""
        return self._scope is not None

    @property
    def is_down(self) -> bool:
        """Whether it was killed."""
        return self._scope is None

    async def start(self) -> bool:
        """Start the program; return when its instance is open."""
        if self._scope is None:
            await self._nursery.start(self._live)
        return True

    async def _live(self, *, task_status: trio.TaskStatus[None]) -> None:
        self._ended = trio.Event()
        try:
            with trio.CancelScope() as self._scope:
                config = ClientConfig(
                    name_servers=self._name_servers, rpc_timeout_s=self._rpc_timeout_s
                )
                async with connect(config=config) as self.instance:
                    task_status.started()
                    await self._program(self)
        finally:
            self._scope = self.instance = None
            self._ended.set()

    async def kill(self) -> None:
        """Let go of everything in the middle of what it does."""
        if self._scope is not None:
            if self.instance is not None:
                self.instance.abandon()
            self.instance = None
            self._scope.cancel()
            await self._ended.wait()

    async def stop(self) -> bool:
        """End it like `kill`: clients have nothing to lose."""
        await self.kill()
        return True

    def pause(self) -> None:
        """Nothing: the runner's own process cannot stand still."""

    def resume(self) -> None:
        """Nothing."""
