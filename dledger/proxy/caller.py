"""The client that makes a call, and how long it waits for the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
