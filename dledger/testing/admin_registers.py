"""What administrators set, each a register, and views of it: a judge of any cluster.

Each register gets numbers, one after the other and each of them once. What the leader shows of it,
in whatever view, is the newest acknowledged one, or one whose outcome was never known; anything
else contradicts. The leader is asked, as others may be behind. The registers stand in
``admin_registers.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec import json

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import BrokerUnreachableError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.fastjson import loads
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD

ASK_S: Final = 10.0
WRITE_AND_READ: Final = 6  # a topic's right; with one more, topics made of it have it
WRITES_PER_TURN, VIEWS_PER_TURN = 3, 4

Row = Mapping[str, Any]
"""A write or a view, as the file has it."""


@dataclass(frozen=True, slots=True)
class _Register:
    """How one is set and shown.

    Attributes:
        may: What a view may show; None: it is not there.
        open: Likewise, what was never answered.
    """

    writes: tuple[Row, ...]
    views: tuple[Row, ...]
    may: set[int | None] = field(default_factory=lambda: {None})
    open: set[int | None] = field(default_factory=set)


class AdminRegisters:
    """The registers of one cluster; one task uses them."""

    def __init__(
        self,
        broker_name: str,
        rng: Random,
        leadership: Callable[[str], object | None],
        contradicts: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is set yet.

        Args:
            leadership: The leader and its term, where an address is the leader's; else None. An
                answer counts only where it is the same before and after.
            contradicts: Called with a sentence for each answer that cannot be.
        """
        self._broker_name = broker_name
        self._rng = rng
        self._leadership = leadership
        self._contradicts = contradicts
        text = Path(__file__).with_suffix(".toml").read_text()
        rows = tomllib.loads(text.replace("<broker>", broker_name))
        self._always: list[Row] = rows.pop("always")
        self._registers = [_Register(**each) for each in rows.values()]
        self._number = 0

    async def turn(self, instance: ClientInstance) -> bool:
        """Set one register a few times and look at it; ask for other views.

        Returns whether all was answered.

        Raises ClientError: the cluster is in trouble.
        """
        first = self._registers[0]
        register = first if None in first.may else self._rng.choice(self._registers)
        await self._look(instance, register)
        for _ in range(self._rng.randint(1, WRITES_PER_TURN)):
            self._number += 1
            if not await self._write(instance, register, self._number):
                return False
            await self._look(instance, register)
        for view in self._rng.sample(self._always, VIEWS_PER_TURN):
            answer = await self._view(instance, view)
            allowed = {"SUCCESS", *view.get("allows", ())}
            if answer is not None and ResponseCode(answer.code).name not in allowed:
                self._contradicts(f"{view['code']} is refused: {answer.remark}")
        return True

    async def _write(self, instance: ClientInstance, register: _Register, number: int) -> bool:
        for write in register.writes:
            sets = write.get("sets", "number")
            if sets == "absence" and self._rng.random() < 0.5:
                continue
            value = None if sets == "absence" else number
            was_open = value in register.open
            register.open.add(value)
            answer = await self._ask(instance, _filled(write, number))
            if not was_open and (not answer.code or outcome_of(answer) == "not_stored"):
                register.open.discard(value)
            if answer.code:
                return False
            if sets != "nothing":
                register.may.clear()
                register.may.add(value)
        return True

    async def _look(self, instance: ClientInstance, register: _Register) -> None:
        for view in register.views:
            answer = await self._view(instance, view)
            may = register.may | register.open
            if answer is not None and (shown := _shown(answer, view["shows"])) not in may:
                self._contradicts(f"{view['code']} shows {shown}, may be {may}")

    async def _view(self, instance: ClientInstance, view: Row) -> RemotingCommand | None:
        """Return the answer of the leader; None: it does not lead all the while, or is busy."""
        before = self._leadership(self._address(instance))
        answer = await self._ask(instance, view)
        after = self._leadership(self._address(instance))
        is_refused = answer.code in (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY)
        return None if is_refused or before is None or before != after else answer

    def _address(self, instance: ClientInstance) -> str:
        address = instance.leaders.address(self._broker_name)
        if address is None:
            raise BrokerUnreachableError(f"no leader of {self._broker_name} is known")
        return address

    async def _ask(self, instance: ClientInstance, row: Row) -> RemotingCommand:
        address = self._address(instance)
        body = row.get("body", "")
        encoded = body.encode() if isinstance(body, str) else json.encode(body)
        code, fields = RequestCode[row["code"]], dict(row.get("fields", {}))
        answer = await instance.ask(address, code, fields, body=encoded, timeout_s=ASK_S)
        if answer.code:
            instance.leader_search.note_refusal(self._broker_name, address, answer)
        return answer


def _filled(part: Any, number: int) -> Any:
    """Return a part of a request with the number that it sets."""
    if isinstance(part, dict):
        return {key: _filled(value, number) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, number) for value in part]
    if part in ("<odd>", "<perm>"):
        return bool(number % 2) if part == "<odd>" else WRITE_AND_READ + number % 2
    return part.replace("<number>", str(number)) if isinstance(part, str) else part


def _shown(answer: RemotingCommand, way: list[str | int]) -> Any:
    """Return the number that an answer shows, None where what is asked for is not there."""
    if answer.code or answer.ext.get(NOT_MADE_FIELD) == "true":
        return None
    value: Any = loads(answer.body) if answer.body else None
    for key in way:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return int(value.rpartition(":")[2]) if isinstance(value, str) else value
