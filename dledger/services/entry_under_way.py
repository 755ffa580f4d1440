"""The one entry of a service that is proposed and not applied yet: what its answer means.

A service of the leader that decides on applied state alone has at most one entry under way: queue
locks and POP. The answer to a proposal may come after the leadership has ended, and may leave open
what becomes of it; that is decided here, and the services act on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from dledger.broker_errors import NotLeaderError, PendingFullError, UnknownOutcomeError
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed

MAX_WAITING: Final = 10_000
"""Requests of a service that wait for the entry before theirs; more are refused as busy."""


class Request(Protocol):
    """What waits for its answer."""

    def fail(self, error: MQError) -> None:
        """Answer with *error*."""


RequestT = TypeVar("RequestT", bound=Request)
DecisionT = TypeVar("DecisionT")


@dataclass(slots=True, eq=False)
class EntryUnderWay(Generic[RequestT, DecisionT]):
    """The change under way.

    Attributes:
        asked: The requests that it answers.
        is_late: Whether they are answered that it may be stored or not; it is not settled yet.
    """

    asked: list[RequestT]
    decision: DecisionT
    is_late: bool = False


class OneEntryAtATime(ABC, Generic[RequestT, DecisionT]):
    """A service that decides on applied state alone; what arrives meanwhile shares the next entry.

    Requests of a crowd are answered in turns (`BrokerGroup.turns`).
    """

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._waiting: deque[RequestT] = deque()
        self._entry: EntryUnderWay[RequestT, DecisionT] | None = None
        self._term = 0

    @abstractmethod
    def _work(self) -> None:
        """Decide what waits, if no entry is under way."""

    @abstractmethod
    def _arrived(self, entry: EntryUnderWay[RequestT, DecisionT]) -> None:
        """What was under way is applied; its requests are answered apart."""

    def _not_stored(self, entry: EntryUnderWay[RequestT, DecisionT]) -> None:
        """What was under way never will be applied."""

    @abstractmethod
    def _answer(self, asked: list[RequestT], proposed: Proposed) -> None:
        """Answer the requests of an entry that is applied."""

    def role_changed(self) -> None:
        """Begin or end a term at once; to be put into the group's `on_role_change`."""
        self._leads()

    def _leads(self) -> bool:
        leadership = self._group.leadership
        term = 0 if leadership is None else leadership.term
        if term != self._term:
            self._term = term
            self._end()
        return leadership is not None

    def _end(self) -> None:
        self._entry = None
        waiting, self._waiting = self._waiting, deque()
        self._fail(waiting, self._not_leader())

    def _not_leader(self) -> NotLeaderError:
        return NotLeaderError(self._group.leader_address, self._group.term)

    def _take(self, request: RequestT) -> None:
        """Let a request wait for the next decision.

        Raises NotLeaderError, PendingFullError: nothing was changed, and it is not answered.
        """
        if not self._leads():
            raise self._not_leader()
        if self._entry is not None and self._entry.is_late:
            raise PendingFullError("it is not known yet what became of an earlier change")
        if len(self._waiting) >= MAX_WAITING:
            raise PendingFullError(f"{MAX_WAITING} requests of this kind wait already")
        self._waiting.append(request)
        self._work()

    def _answered(self, entry: EntryUnderWay[RequestT, DecisionT], proposed: Proposed) -> None:
        match proposed.outcome:
            case "stored":
                self._answer(entry.asked, proposed)
            case "unknown":
                entry.is_late = True
                self._fail(entry.asked, UnknownOutcomeError("the change may still be stored"))
                if self._leads() and self._entry is entry:
                    waiting, self._waiting = self._waiting, deque()
                    self._fail(waiting, PendingFullError("an earlier change got no majority"))
            case _:
                self._fail(entry.asked, proposed.error or self._not_leader())

    def _settled(self, entry: EntryUnderWay[RequestT, DecisionT], proposed: Proposed) -> None:
        if not self._leads() or self._entry is not entry:
            return
        self._entry = None
        if proposed.outcome == "stored":
            self._arrived(entry)
        else:
            self._not_stored(entry)
        self._work()
        self._group.kick()

    def _fail(self, requests: Iterable[RequestT], error: MQError) -> None:
        self._group.turns.call_each(lambda request: request.fail(error), requests)
