"""RAFT_CHANGE: what is asked for is carried out, and errors say what happened."""

from typing import Any, cast

import pytest

from dledger.broker_errors import (
    ChangePendingError,
    ChangeRefusedError,
    NotLeaderError,
    UnknownOutcomeError,
)
from dledger.commitlog.errors import MQError
from dledger.processors.raft import MembershipChanges, RaftChangeProcessor
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import later
from tests.harness.fake_group import FakeConnection


class Changes:
    """Records what it is asked for; fails with *error* if there is one."""

    def __init__(self, error: MQError | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error = error

    async def _do(self, *what: Any) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    async def add(self, name: str, address: tuple[str, int]) -> None:
        await self._do("add", name, address)

    async def observe(self, name: str, address: tuple[str, int]) -> None:
        await self._do("observe", name, address)

    async def promote(self, name: str) -> None:
        await self._do("promote", name)

    async def replace(self, name: str, address: tuple[str, int]) -> None:
        await self._do("replace", name, address)

    async def remove(self, name: str) -> None:
        await self._do("remove", name)

    async def transfer(self, name: str | None) -> None:
        await self._do("transfer", name)


async def ask(changes: Changes, **ext: str) -> RemotingCommand:
    processor = RaftChangeProcessor(cast("MembershipChanges", changes))
    command = request(RequestCode.RAFT_CHANGE, dict(ext))
    answered = await later(FakeConnection(), command, processor.handle(cast("Any", None), command))
    assert isinstance(answered, RemotingCommand)
    return answered


@pytest.mark.parametrize(
    ("ext", "asked"),
    [
        ({"op": "add", "name": "n3", "address": "h:40911"}, ("add", "n3", ("h", 40911))),
        ({"op": "replace", "name": "n1", "address": "[::1]:7"}, ("replace", "n1", ("::1", 7))),
        ({"op": "observe", "name": "n3", "address": "h:1"}, ("observe", "n3", ("h", 1))),
        ({"op": "promote", "name": "n3"}, ("promote", "n3")),
        ({"op": "remove", "name": "n1", "address": ""}, ("remove", "n1")),
        ({"op": "transfer", "name": ""}, ("transfer", None)),
        ({"op": "transfer", "name": "n2"}, ("transfer", "n2")),
    ],
)
async def test_what_is_asked_for_is_carried_out(
    ext: dict[str, str], asked: tuple[Any, ...]
) -> None:
    changes = Changes()
    answer = await ask(changes, **ext)
    assert (answer.code, changes.asked) == (0, [asked])


@pytest.mark.parametrize(
    ("ext", "says"),
    [
        ({"op": "add", "name": "n3"}, "is not host:port"),
        ({"op": "add", "name": "n3", "address": "h"}, "is not host:port"),
        ({"op": "add", "name": "n3", "address": "h:70000"}, "is not host:port"),
        ({"op": "remove"}, "name of the member is missing"),
        ({"op": "destroy", "name": "n3"}, "is not add, observe, promote, remove"),
        ({}, "name of the member is missing"),
    ],
)
async def test_request_that_makes_no_sense_changes_nothing(ext: dict[str, str], says: str) -> None:
    changes = Changes()
    answer = await ask(changes, **ext)
    assert answer.code == 1
    assert says in (answer.remark or "")
    assert changes.asked == []


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (NotLeaderError("h:1", 3), 14, "not_stored"),
        (ChangePendingError("wait"), 14, "not_stored"),
        (ChangeRefusedError("never"), 1, "not_stored"),
        (UnknownOutcomeError("not known"), 1, "unknown"),
    ],
)
async def test_refusal_names_what_happened(error: MQError, code: int, outcome: str) -> None:
    answer = await ask(Changes(error), op="remove", name="n1")
    assert answer.ext is not None
    assert (answer.code, answer.ext["outcome"]) == (code, outcome)
    assert answer.remark == str(error)
    assert answer.ext.get("leaderAddr") == ("h:1" if isinstance(error, NotLeaderError) else None)
