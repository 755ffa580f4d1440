"""The client that makes a call, how long it waits for the answer, and what is held for its host."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from dledger.remoting.seams import Clock

CLIENT_ID: Final = "x-mq-client-id"
LANGUAGE: Final = "x-mq-language"
AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"

CLIENT_ID_CHARS_MAX: Final = 1_024
"""Of the name of a client; a longer one is none. Clients are known by it, and theirs have host,
process and a number."""

ALGORITHM: Final = "MQv2-HMAC-SHA1"
SIGNED: Final = re.compile(
    # No text is read in two ways: a long header without a comma would have every pair of places
    # tried.
    rf"{ALGORITHM} +Credential=(?P<key>[^,/\s]++)(?:[/\s][^,]*+)?, *"
    r"SignedHeaders=(?P<signed>[^,\s]++),"
    r" *Signature=(?P<signature>[0-9a-fA-F]+)"
)
"""The form of `AUTHORIZATION`."""

ANSWER_MARGIN_S: Final = 0.2
"""Kept of a call's time for the way back of its answer."""

TIMEOUT_S: Final = 10.0
"""Of a call that states none."""

TIMEOUT_S_MIN: Final = 0.001
"""Of a step whose call has no time left."""

MARGIN_PART: Final = 0.25
"""Of a call's time is kept at most: one that has little time has most of it for its work."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One call's client.

    Attributes:
        time_left_s: From its arrival until the client gives the call up; None: it waits.
        clock: By which its time passes; None: it has not begun.
        deadline_s: On that clock, when the client gives the call up.
    """

    client_id: str
    language: str = ""
    peer: str = ""
    time_left_s: float | None = None
    authorization: str = field(default="", repr=False)
    date_time: str = ""
    clock: Clock | None = field(default=None, repr=False)
    deadline_s: float = 0.0

    @property
    def signed(self) -> re.Match[str] | None:
        """Return access key and signature; None: the call has none that can be read."""
        return SIGNED.fullmatch(self.authorization.strip())

    @property
    def name(self) -> str:
        """Return what the client is known by; empty: it names itself by nothing.

        Clients of two accounts are two, whatever they call themselves: what is meant for one of
        them, a message with its body, must not reach the other.
        """
        found = self.signed
        return f"{self.client_id} {found['key']}" if self.client_id and found else self.client_id

    @classmethod
    def of(cls, metadata: Mapping[str, str], peer: str, time_left_s: float | None) -> Caller:
        """Return the caller that a call's metadata name."""
        client_id = metadata.get(CLIENT_ID, "")
        return cls(
            client_id if len(client_id) <= CLIENT_ID_CHARS_MAX else "",
            metadata.get(LANGUAGE, ""),
            peer,
            time_left_s,
            metadata.get(AUTHORIZATION, ""),
            metadata.get(DATE_TIME, ""),
        )

    def begun(self, clock: Clock) -> Caller:
        """Return the caller with its time passing from now on."""
        if self.time_left_s is None:
            return self
        return Caller(  # half of the price of `replace`
            self.client_id,
            self.language,
            self.peer,
            self.time_left_s,
            self.authorization,
            self.date_time,
            clock,
            clock.monotonic() + self.time_left_s,
        )

    def left_s(self, margins: float = 1.0) -> float | None:
        """Return how long the call may still take; None: as long as it likes."""
        if self.time_left_s is None:
            return None
        margin_s = min(ANSWER_MARGIN_S, self.time_left_s * MARGIN_PART) * margins
        now_s = 0.0 if self.clock is None else self.clock.monotonic()
        end_s = self.time_left_s if self.clock is None else self.deadline_s
        return end_s - margin_s - now_s

    def timeout_s(self, most_s: float = TIMEOUT_S) -> float:
        """Return how long brokers may take for the next step, at most *most_s*."""
        left_s = self.left_s()
        return most_s if left_s is None else max(TIMEOUT_S_MIN, min(most_s, left_s))


HOST_SHARE: Final = 4
"""One host has a fourth of either at most: those of others are served then."""

REQUEST_MESSAGE_BYTES_MAX: Final = 5 << 20
"""Of one request: the largest body that brokers take, and what stands beside it; a batch has the
limit of one message. gRPC ends a call with more as RESOURCE_EXHAUSTED before it has it."""


class HeldBytes:
    """How many bytes are held for each host."""

    def __init__(self, limit_bytes: int) -> None:
        """Begin with none."""
        self.used_bytes = 0
        self._limit_bytes = limit_bytes
        self._by_host: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def is_full(self, host: str) -> bool:
        """Return whether nothing more is to be begun for a client of *host*."""
        if self.used_bytes >= self._limit_bytes:
            return True
        return self._by_host[host] >= self._limit_bytes // HOST_SHARE

    def fits(self, size_bytes: int) -> bool:
        """Return whether an answer that was begun before can be kept still."""
        return self.used_bytes + size_bytes <= 2 * self._limit_bytes

    def count(self, host: str, change_bytes: int) -> None:
        """Count what is held from now on; less than none: what is not held any more."""
        self.used_bytes += change_bytes
        held_bytes = self._by_host[host] + change_bytes
        if held_bytes:
            self._by_host[host] = held_bytes
        else:
            self._by_host.pop(host, None)
        if change_bytes < 0 and self._waiting:
            self._give_turns()

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[Callable[[int], None]]:
        """Hold the bytes of the largest request while the block runs; wait until they are free.

        Yields what changes how many it holds from then on.
        """
        if host in self._waiting or not self._has_turn(host):
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(host, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it had its turn, and was ended at the same time
                    self.count(host, -REQUEST_MESSAGE_BYTES_MAX)
                raise
        else:
            self.count(host, REQUEST_MESSAGE_BYTES_MAX)
        held_bytes = REQUEST_MESSAGE_BYTES_MAX

        def hold(size_bytes: int) -> None:
            nonlocal held_bytes
            self.count(host, size_bytes - held_bytes)
            held_bytes = size_bytes

        try:
            yield hold
        finally:
            hold(0)

    def _has_turn(self, host: str) -> bool:
        more, share = REQUEST_MESSAGE_BYTES_MAX, self._limit_bytes // HOST_SHARE
        return self._by_host[host] + more <= share and self.used_bytes + more <= self._limit_bytes

    def _give_turns(self) -> None:
        for host, waiting in list(self._waiting.items()):
            while waiting and (waiting[0].done() or self._has_turn(host)):
                first = waiting.popleft()
                if not first.done():
                    self.count(host, REQUEST_MESSAGE_BYTES_MAX)
                    first.set_result(None)
            if not waiting:
                del self._waiting[host]
